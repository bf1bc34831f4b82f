"""MTP beside or inside its target: the target's checkpoint rewritten, MiMo's layout for vLLM, and transformers' `use_mtp`.

All drive a head with the target's last state and share the target's embedding and whole head. vLLM applies one module again and
again; transformers has a module for each depth, so one that is applied again is written as often as it is to draft. Where a
checkpoint has MTP weights of its own, vLLM gets a copy of the target's folder in which exactly those are new, and files without
any are links. vLLM finds its model class by the target's config.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from configs.runtime.errors import InputError
from configs.runtime.files import read_json
from configs.schema.heads import MtpSettings
from heads.formats.exporting.source import Source, vllm_command
from heads.formats.layout import MTP_PARTS, ExportLayout, has_mtp_modules, layer_config, renamed
from heads.frozen.mtp_checkpoint import NativeMtp
from heads.frozen.weights import INDEX_FILE, SINGLE_FILE, Weights, files_by_key, quantization_of

BORROWERS = ("llama",)  # vLLM's MiMo class runs a module on these; tried
TRANSFORMERS_FAMILIES = ("llama", "qwen3")  # decoded with `use_mtp` after one line; tried
TRANSFORMERS_NAMING = "transformers"  # is read by `use_mtp`; vLLM has no model class for it
HYBRID = ("qwen3_next", "qwen3_5")  # vLLM 0.32 on a CPU fails to decode these with prefix caching (Qwen3-Next tried)
QKV_BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias")  # which MiMo's class asks for
EXTRA_FILE = "mtp.safetensors"
OTHER_KEYS_NOTE = (
    "From the second depth on, transformers attends to the states of that depth, draftsmith and vLLM to those of the "
    "first: acceptance there is lower than measured. Train with head.shared_depths false for transformers."
)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".index.json")


def vllm(source: Source) -> ExportLayout:
    """Return the target with the modules in it where it has places for them, else MiMo's layout beside it."""
    settings: MtpSettings = source.settings
    source.require("vLLM", train_head=False)
    if not settings.shared_depths and settings.num_depths > 1:
        raise InputError(
            "vLLM 0.32 applies the first MTP module at every depth, and this head has one for each (shared_depths)"
        )
    return stitched(source) if has_mtp_modules(source.target.weights) else mimo(source)


def mimo(source: Source) -> ExportLayout:
    """Return MiMo's layout in a folder of its own, for a target of the families tried."""
    _, family = _checked(source, "vLLM"), source.target.config.model_type
    if family not in BORROWERS:
        raise InputError(f"vLLM has no MTP for a {family} target whose checkpoint has no MTP weights of its own")
    shape, weights = source.target.shape, source.mtp_modules(hidden_first=True)
    weights = renamed(renamed(weights, MTP_PARTS), [("mtp_layers.", "model.mtp_layers.")])
    biases = sorted(name for name in weights if name.endswith(".bias") and not name.endswith(QKV_BIASES))
    if biases:
        raise InputError(f"vLLM's MiMo class, which a {family} target borrows, has no place for {biases[0]}")
    keys = shape.num_key_value_heads * shape.head_width
    # MiMo's class asks for biases; a Llama block has none.
    for part, size in (("q", shape.num_heads * shape.head_width), ("k", keys), ("v", keys)):
        weights.setdefault(f"model.mtp_layers.0.self_attn.{part}_proj.bias", torch.zeros(size, dtype=source.dtype))
    config = layer_config(shape, "qwen2", source.target.config.num_hidden_layers, source.target.vocab_size) | {
        "architectures": ["MiMoForCausalLM"],
        "num_nextn_predict_layers": 1,
        "dtype": source.dtype_name,
    }
    return ExportLayout(
        config=config,
        weights=weights,
        serve=vllm_command(source, "mtp", "--hf-overrides", '{"num_nextn_predict_layers": 1}'),
        notes=(
            "vLLM reads a zero in place of the embedding of position 0; draftsmith does not.",
            *source.whole_vocabulary_note("vLLM"),
        ),
    )


def stitched(source: Source) -> ExportLayout:
    """Return the target's checkpoint with the head's modules in the place of its own, where vLLM runs them as trained."""
    target = source.target
    native = NativeMtp(target.folder)
    if native.naming.families == TRANSFORMERS_NAMING:
        raise InputError(
            f"{target.folder} has MTP weights under names that transformers alone reads, and vLLM has no class for them"
        )
    if source.settings.reads != native.naming.reads:
        raise InputError(
            f"it reads the target's last state {source.settings.reads} (head.reads), and vLLM gives modules of "
            f"{native.naming.families} the one {native.naming.reads}"
        )
    modules = {name: stored for name, stored in source.body().items() if name.startswith("layers.")}
    own = len({name.split(".")[1] for name in modules})
    if own != native.num_layers:
        raise InputError(f"it has {own} MTP modules, and {target.folder} has places for {native.num_layers}")
    hidden_first = source.settings.concat_order == "hidden_first"
    places = native.places(modules, hidden_first=hidden_first)
    options = ("--no-enable-prefix-caching",) if target.config.model_type.startswith(HYBRID) else ()
    return ExportLayout(
        config=read_json(target.folder / "config.json", "config of the target"),
        weights={piece.key: target.weights[piece.key][...] for pieces in places.values() for piece in pieces},
        serve=vllm_command(source, "mtp", *options, stitched=True),
        notes=(
            "The folder is the target with new MTP weights, in the dtype of the old ones; it shares files with the target's "
            "folder, so change neither in place.",
            *source.whole_vocabulary_note("vLLM"),
        ),
        holds_target=True,
        make=partial(native.stitch_into, values=modules, places=places),
    )


def transformers(source: Source) -> ExportLayout:
    """Return a copy of the target's folder with MTP modules in it, for `generate(use_mtp=True)`."""
    settings, target = _checked(source, "transformers"), source.target
    _check_target_for_transformers(source)
    num_depths = source.num_speculative_tokens
    modules = source.mtp_modules(hidden_first=False)
    weights: Weights = {}
    for depth in range(num_depths):
        number = 0 if settings.shared_depths else depth
        parts = {name: each for name, each in modules.items() if name.startswith(f"layers.{number}.")}
        pairs = [(f"layers.{number}.mtp_block.", f"mtp.layers.{depth}."), (f"layers.{number}.", f"mtp.layers.{depth}.")]
        weights |= renamed(parts, pairs)
    files, weight_map = _target_files(target.folder)
    config = read_json(target.folder / "config.json", "config of the target") | {"num_mtp_layers": num_depths}
    if config.get("layer_types") is not None:
        config["mtp_layer_types"] = ["full_attention"] * num_depths
    return ExportLayout(
        config=config,
        weights=weights,
        serve=lambda out: "\n".join(
            [
                f"model = AutoModelForCausalLM.from_pretrained({out!r})",
                'model._keys_to_ignore_on_load_unexpected = [r"^mtp\\."]  # where transformers looks for the names',
                "model.generate(**inputs, use_mtp=True, do_sample=False)",
            ]
        ),
        notes=(
            f"One prompt at a time; {num_depths} drafts a round. Every call reads the modules again from the folder, so do not "
            "move it after loading.",
            "`save_pretrained` of the loaded model drops the modules.",
            *([] if not settings.shared_depths or num_depths == 1 else [OTHER_KEYS_NOTE]),
            *source.whole_vocabulary_note("transformers"),
        ),
        holds_target=True,
        weights_file=EXTRA_FILE,
        files=files,
        json_files={INDEX_FILE: {"metadata": {}, "weight_map": weight_map | dict.fromkeys(weights, EXTRA_FILE)}},
    )


def _checked(source: Source, engine: str) -> MtpSettings:
    """Return the settings of a head that is driven by normed states and ends in the target's head."""
    source.target.check_plain()
    source.require(engine, reads="post_norm", train_head=False)
    settings: MtpSettings = source.settings
    return settings


def _check_target_for_transformers(source: Source) -> None:
    target, family = source.target, source.target.config.model_type
    if family not in TRANSFORMERS_FAMILIES:
        raise InputError(f"transformers' use_mtp was tried with {' and '.join(TRANSFORMERS_FAMILIES)} targets, got {family}")
    if (quantised := quantization_of(target.folder)) is not None:
        raise InputError(
            f"{target.folder} is quantised ({quantised['quant_method']}), and transformers would take modules in the dtype of "
            "training for quantised ones: export for vllm, or train on an unquantised copy"
        )
    there = sorted(name for name in target.weights if name.startswith("mtp."))
    if there:
        raise InputError(
            f"{target.folder} has MTP weights of its own ({there[0]}, ...), which an export for transformers does not replace"
        )


def _target_files(folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    weight_map = files_by_key(folder)
    alias = {SINGLE_FILE: "target.safetensors"}  # transformers would not look at an index beside the usual name
    files = {alias.get(file, file): folder / file for file in set(weight_map.values())}
    for path in folder.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES) and path.name != "config.json":
            files[path.name] = path
    return files, {name: alias.get(file, file) for name, file in weight_map.items()}

"""MTP beside or inside its target: the layout that vLLM borrows from MiMo, and transformers' `use_mtp`.

Both drive a head with the target's state after its final norm, and share the target's embedding and whole head. vLLM applies
one module again and again; transformers has a module for each depth, so a module that is applied again is written as often as
it is to draft. Where a checkpoint has MTP weights of its own, vLLM gets those written over
(`heads.formats.exporting.stitched`). K depths.
"""

from __future__ import annotations

from pathlib import Path

from configs.runtime.errors import InputError
from configs.runtime.files import read_json
from configs.schema.heads import MtpSettings
from heads.formats.exporting.source import Source
from heads.formats.exporting.speculators import mtp_shapes, vllm_command
from heads.formats.exporting.stitched import stitched
from heads.formats.layout import ExportLayout, Shapes, decoder_layer, layer_config, renamed
from heads.formats.names import MTP_PARTS, has_mtp_modules
from heads.frozen.checkpoint_files import INDEX_FILE, SINGLE_FILE, Weights, files_by_key, zeros
from heads.frozen.quantized import quantization_of

BORROWERS = ("llama",)  # vLLM's MiMo class runs a module on these; tried
TRANSFORMERS_FAMILIES = ("llama", "qwen3")  # decoded with `use_mtp` after one line; tried
EXTRA_FILE = "mtp.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".index.json")


def vllm(source: Source) -> ExportLayout:
    """Return the target with the modules in it where it has places for them, else MiMo's layout beside it."""
    settings: MtpSettings = source.settings
    source.check_head_is_the_targets("vLLM")
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
    shape, weights = source.target.shape, _modules(source, hidden_first=True)
    weights = renamed(renamed(weights, MTP_PARTS), [("mtp_layers.", "model.mtp_layers.")])
    prefix, keys = "model.mtp_layers.0.", shape.num_key_value_heads * shape.head_width
    # MiMo's class asks for biases; a Llama block has none.
    for part, size in (("q", shape.num_heads * shape.head_width), ("k", keys), ("v", keys)):
        weights.setdefault(f"{prefix}self_attn.{part}_proj.bias", zeros((size,), source.dtype))
    config = layer_config(shape, "qwen2", source.target.config.num_hidden_layers, source.target.vocab_size) | {
        "architectures": ["MiMoForCausalLM"],
        "num_nextn_predict_layers": 1,
        "dtype": source.dtype_name,
    }
    return ExportLayout(
        config=config,
        weights=weights,
        expected=mtp_shapes(prefix, source) | decoder_layer(prefix, shape, biases=True),
        serve=vllm_command(source, "mtp", "--hf-overrides", '{"num_nextn_predict_layers": 1}'),
        notes=(
            "vLLM reads a zero in place of the embedding of position 0; draftsmith does not.",
            *source.whole_vocabulary_note("vLLM"),
        ),
    )


def transformers(source: Source) -> ExportLayout:
    """Return a copy of the target's folder with MTP modules in it, for `generate(use_mtp=True)`."""
    settings, target = _checked(source, "transformers"), source.target
    family = target.config.model_type
    if family not in TRANSFORMERS_FAMILIES:
        raise InputError(f"transformers' use_mtp was tried with {' and '.join(TRANSFORMERS_FAMILIES)} targets, got {family}")
    if (quantised := quantization_of(target.folder)) is not None:
        raise InputError(
            f"{target.folder} is quantised ({quantised['quant_method']}), and transformers would take modules in the dtype of "
            "training for quantised ones: export for vllm, or train on an unquantised copy"
        )
    there = sorted(name for name in target.weights if name.startswith("mtp."))
    if there:
        raise InputError(f"{target.folder} has MTP weights of its own ({there[0]}, ...): export for vllm")
    num_depths = source.num_speculative_tokens
    modules = _modules(source, hidden_first=False)
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
        expected=_depth_shapes(source, num_depths),
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
            *_other_keys_note(source),
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
    settings: MtpSettings = source.settings
    if settings.reads != "post_norm":
        raise InputError(
            f"it reads the target's last state before the final norm (head.reads), and {engine} gives the normed one"
        )
    source.check_head_is_the_targets(engine)
    return settings


def _modules(source: Source, *, hidden_first: bool) -> Weights:
    """Return all modules, their projections reading in the order asked for."""
    if (source.settings.concat_order == "hidden_first") == hidden_first:
        return source.body()
    return {
        name: stored.halves_swapped() if name.endswith("eh_proj.weight") else stored for name, stored in source.body().items()
    }


def _depth_shapes(source: Source, num_depths: int) -> Shapes:
    shape = source.target.shape
    shapes: Shapes = {}
    for depth in range(num_depths):
        prefix = f"mtp.layers.{depth}."
        shapes |= decoder_layer(prefix, shape, norm_heads=source.target.config.model_type == "qwen3")
        shapes |= {f"{prefix}{name}.weight": (shape.width,) for name in ("enorm", "hnorm", "post_norm")}
        shapes[f"{prefix}eh_proj.weight"] = (shape.width, 2 * shape.width)
    return shapes


def _target_files(folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the target's files to take over, by name, and which file holds which tensor.

    A single weights file gets another name, because transformers would not look at an index beside the usual one.
    """
    weight_map = files_by_key(folder)
    alias = {SINGLE_FILE: "target.safetensors"}
    files = {alias.get(file, file): folder / file for file in set(weight_map.values())}
    for path in folder.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES) and path.name != "config.json":
            files[path.name] = path
    return files, {name: alias.get(file, file) for name, file in weight_map.items()}


def _other_keys_note(source: Source) -> tuple[str, ...]:
    if not source.settings.shared_depths or source.num_speculative_tokens == 1:
        return ()
    return (
        "From the second depth on, transformers attends to the states of that depth, draftsmith and vLLM to those of the "
        "first: acceptance there is lower than measured. Train with head.shared_depths false for transformers.",
    )

"""MTP for vLLM: the target's checkpoint with other modules in it, or MiMo's layout beside a target that has none.

vLLM drives a head with the target's last state, applies one module again and again, and shares the target's embedding and whole
head. Where a checkpoint has MTP weights of its own, the export is a copy of the target's folder in which exactly those are new,
and files without any are links. vLLM finds its model class by the target's config.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from configs.runtime.errors import InputError
from heads.formats.exporting.source import Source, vllm_command
from heads.formats.layout import ExportLayout, has_mtp_modules, layer_config, renamed
from heads.frozen.mtp_checkpoint import NativeMtp

BORROWERS = ("llama",)  # vLLM's MiMo class runs a module on these; tried
HYBRID = ("qwen3_next", "qwen3_5")  # vLLM 0.32 on a CPU fails to decode these with prefix caching (Qwen3-Next tried)
QKV_BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias")  # which MiMo's class asks for
MIMO = tuple(  # prefixes of a module's tensors: ours, and MiMo's
    (f"layers.0.{ours}.", f"model.mtp_layers.0.{theirs}")
    for ours, theirs in (
        ("eh_proj", "input_proj."),
        ("enorm", "token_layernorm."),
        ("hnorm", "hidden_layernorm."),
        ("post_norm", "final_layernorm."),
        ("mtp_block", ""),
    )
)


def vllm(source: Source) -> ExportLayout:
    """Return the target with the modules in it where it has places for them, else MiMo's layout beside it."""
    source.require("vLLM", train_head=False)
    return stitched(source) if has_mtp_modules(source.target.weights) else mimo(source)


def mimo(source: Source) -> ExportLayout:
    """Return MiMo's layout in a folder of its own, for a target of the families tried."""
    source.target.check_plain()
    source.require("vLLM", reads="post_norm")
    family, shape = source.target.config.model_type, source.target.shape
    if family not in BORROWERS:
        raise InputError(f"vLLM has no MTP for a {family} target whose checkpoint has no MTP weights of its own")
    weights = renamed({name: _state_first(name, stored) for name, stored in source.body().items()}, MIMO)
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


def _state_first(name: str, stored: Tensor) -> Tensor:
    """Return a tensor of ours for a module whose projection reads the state before the embedding."""
    return stored.roll(stored.shape[1] // 2, 1) if name.endswith("eh_proj.weight") else stored


def stitched(source: Source) -> ExportLayout:
    """Return the target's checkpoint with the head's modules in the place of its own, where vLLM runs them as trained."""
    target = source.target
    native = NativeMtp(target.folder)
    if source.settings.reads != native.naming.reads:
        raise InputError(
            f"it reads the target's last state {source.settings.reads} (head.reads), and vLLM gives modules of "
            f"{native.naming.families} the one {native.naming.reads}"
        )
    module = {name: stored for name, stored in source.body().items() if name.startswith("layers.")}
    options = ("--no-enable-prefix-caching",) if target.config.model_type.startswith(HYBRID) else ()
    return ExportLayout(
        serve=vllm_command(source, "mtp", *options, stitched=True),
        notes=(
            "The folder is the target with new MTP weights, in the dtype of the old ones; it shares files with the target's "
            "folder, so change neither in place.",
            *source.whole_vocabulary_note("vLLM"),
        ),
        copy_target=partial(native.stitch_into, values=module, places=native.places(module)),
    )

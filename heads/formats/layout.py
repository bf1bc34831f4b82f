"""What importing and exporting share: the content of a folder for an engine, and other programs' names of our tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from configs.runtime.errors import InputError
from heads.frozen.weights import Weights
from heads.modules.layers import LayerShape

Shapes = dict[str, tuple[int, ...]]
Value = TypeVar("Value")

# Keys of DFlash2's, XPress's and Domino's configs that are settings of ours.
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
XPRESS_KEYS = ("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes")
DOMINO_KEYS = ("gru_hidden_dim", "emb_dim")


@dataclass(frozen=True, kw_only=True)
class ExportLayout:
    """A folder to be written: `config.json`, the tensors under the engine's names, other files."""

    serve: Callable[[str], str]  # the command or lines that serve it from a path, quoted for what reads them
    config: Mapping[str, Any] = field(default_factory=dict)
    weights: Weights = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what a person who serves it must know
    files: Mapping[str, Path] = field(default_factory=dict)  # by name, what is taken over as it is
    json_files: Mapping[str, Any] = field(default_factory=dict)
    convert: Callable[[Path, Path, ExportLayout], None] | None = (
        None  # makes other files, in another folder, of the written one
    )
    copy_target: Callable[[Path], None] | None = None  # fills the folder, in place of the above, with the target and its draft


def check_names(weights: Weights, head: nn.Module) -> None:
    """Refuse tensors that are not exactly a head's; the InputError names all that are missing, unknown or of another shape."""
    expected = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    wrong = []
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing:
        wrong.append(f"lacks {', '.join(missing)}")
    if unknown:
        wrong.append(f"holds unknown {', '.join(unknown)}")
    for name in sorted(expected.keys() & weights.keys()):
        if (shape := tuple(weights[name].shape)) != expected[name]:
            wrong.append(f"holds {name} of shape {list(shape)} where {list(expected[name])} is expected")
    if wrong:
        raise InputError("; ".join(wrong))


def layer_config(shape: LayerShape, model_type: str, num_layers: int, vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_epsilon,
        "max_position_embeddings": shape.max_positions,
        "rope_parameters": shape.rope_parameters,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def renamed(values: Mapping[str, Value], prefixes: Iterable[tuple[str, str]]) -> dict[str, Value]:
    """Return tensors under other names: the first prefix that fits is replaced, other names stay."""
    pairs = tuple(prefixes)

    def new(name: str) -> str:
        return next((other + name.removeprefix(old) for old, other in pairs if name.startswith(old)), name)

    return {new(name): value for name, value in values.items()}


def has_mtp_modules(names: Iterable[str]) -> bool:
    """Return whether some tensors, by their names, look like those of an MTP module."""
    return any("mtp" in name or "eh_proj" in name for name in names)

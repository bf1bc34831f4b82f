"""The content of a folder for an engine, and the shapes that its config implies.

A layout lists its tensors twice: `weights` are those at hand, renamed, and `expected` are those that an engine would
allocate, worked out from sizes alone. An export in which the two differ is not written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from configs.runtime.errors import InputError
from heads.frozen.checkpoint_files import SINGLE_FILE, Weights
from heads.modules.layer_shape import LayerShape

Shapes = dict[str, tuple[int, ...]]
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class ExportLayout:
    """A folder to be written.

    Args:
        config: content of `config.json`.
        weights, expected: the tensors, under the engine's names, and the shape of every one that it asks for.
        serve: gives the command or lines that serve it, by the folder's path, quoted for what reads them.
        notes: what a person who serves it must know.
        weights_file: where the tensors go.
        files, json_files: by name, files that are taken over as they are, and further JSON files.
        convert: called with the folder that was written and checked, and this: makes other files of those in it.
        holds_target: the folder holds all of the target's weights beside the draft's.
        make: fills the empty folder itself, with `weights` among its tensors; then nothing else is written.
    """

    config: Mapping[str, Any]
    weights: Weights
    expected: Shapes
    serve: Callable[[str], str]
    notes: tuple[str, ...] = ()
    weights_file: str = SINGLE_FILE
    files: Mapping[str, Path] = field(default_factory=dict)
    json_files: Mapping[str, Any] = field(default_factory=dict)
    convert: Callable[[Path, ExportLayout], None] | None = None
    holds_target: bool = False
    make: Callable[[Path], None] | None = None


def check_names(there: Mapping[str, tuple[int, ...]], expected: Shapes) -> None:
    """Refuse tensors that are not exactly those expected.

    Raises:
        InputError: some are missing, unknown, or of another shape; all of them are named.
    """
    wrong = []
    missing, unknown = sorted(expected.keys() - there.keys()), sorted(there.keys() - expected.keys())
    if missing:
        wrong.append(f"lacks {', '.join(missing)}")
    if unknown:
        wrong.append(f"holds unknown {', '.join(unknown)}")
    for name in sorted(expected.keys() & there.keys()):
        if there[name] != expected[name]:
            wrong.append(f"holds {name} of shape {list(there[name])} where {list(expected[name])} is expected")
    if wrong:
        raise InputError("; ".join(wrong))


def decoder_layer(
    prefix: str, shape: LayerShape, *, read_width: int | None = None, norm_heads: bool = False, biases: bool = False
) -> Shapes:
    """Return the shapes of a Llama-like decoder layer.

    Args:
        prefix: of its names, with the dot.
        shape: its sizes.
        read_width: what its queries, keys and values are made from; None: its own width.
        norm_heads, biases: queries and keys are normed (Qwen3), or have a bias as values do (Qwen2).
    """
    width, read = shape.width, shape.width if read_width is None else read_width
    queries, keys = shape.num_heads * shape.head_width, shape.num_key_value_heads * shape.head_width
    shapes: Shapes = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (queries, read),
        "self_attn.k_proj.weight": (keys, read),
        "self_attn.v_proj.weight": (keys, read),
        "self_attn.o_proj.weight": (width, queries),
        "mlp.gate_proj.weight": (shape.mlp_width, width),
        "mlp.up_proj.weight": (shape.mlp_width, width),
        "mlp.down_proj.weight": (width, shape.mlp_width),
    }
    if norm_heads:
        shapes |= {"self_attn.q_norm.weight": (shape.head_width,), "self_attn.k_norm.weight": (shape.head_width,)}
    if biases:
        shapes |= {f"self_attn.{part}_proj.bias": (size,) for part, size in (("q", queries), ("k", keys), ("v", keys))}
    return {prefix + name: sizes for name, sizes in shapes.items()}


def layer_config(shape: LayerShape, model_type: str, num_layers: int, vocab_size: int) -> dict[str, Any]:
    """Return the keys that describe draft layers, as configs of transformers spell them."""
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
    """Return tensors or shapes under other names: the first prefix that fits is replaced, other names stay."""
    pairs = tuple(prefixes)

    def new(name: str) -> str:
        for old, other in pairs:
            if name.startswith(old):
                return other + name.removeprefix(old)
        return name

    return {new(name): value for name, value in values.items()}

"""A draft's settings held against the sizes of its stored tensors, before anything is built of them.

A file of a few kilobytes can name a million layers. Only the header of its weights is read here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM

from configs.runtime.errors import InputError
from configs.runtime.files import read_json
from configs.schema.heads import DFlashSettings, HeadSettings
from heads.frozen.checkpoint_files import read_weights
from heads.frozen.quantized import read_float_weights

Shapes = Mapping[str, tuple[int, ...]]

COUNTS = re.compile(r"(layers?|depths|(medusa|hydra)_num_heads)$")
RANKS = (
    "markov_rank",
    "selector_rank",
    "xpress_rank",
    "gru_hidden_dim",
    "emb_dim",
)  # settings of some families, each a side of a matrix
USUAL = 256  # layers or depths that settings may name whatever the number of tensors: some layers share theirs
SLACK = 4  # numbers built for one stored: tied matrices are built twice, and joined ones apart


def stored_shapes(folder: Path) -> Shapes:
    """Return the shape of every tensor in a checkpoint's folder, by name.

    Raises:
        InputError: it holds no weights that can be read.
    """
    return {name: stored.shape for name, stored in read_weights(folder).items()}


def check_counts(settings: Mapping[str, Any], shapes: Shapes, where: str | Path) -> None:
    """Refuse settings that name more layers or depths than there are tensors, in sections of theirs too.

    Raises:
        InputError: names the key.
    """
    for key, value in settings.items():
        if isinstance(value, Mapping):
            check_counts(value, shapes, where)
        elif isinstance(value, int | float) and COUNTS.search(key) and value > max(USUAL, len(shapes)):
            raise InputError(f"{where}: {key} is {value:g}, while the weights beside it hold {len(shapes)} tensors")


def check_head_sizes(settings: HeadSettings, shapes: Shapes, width: int, where: str | Path) -> None:
    """Refuse the settings of a head whose layers could not be in its file.

    Args:
        settings: of the head.
        shapes: of its stored tensors.
        width: of the target's states, of which every layer reads or writes as many.
        where: names the head in the error.

    Raises:
        InputError: names the setting.
    """
    check_counts(settings.model_dump(), shapes, where)
    if isinstance(settings, DFlashSettings) and settings.block_size > USUAL:
        raise InputError(f"{where}: block_size is {settings.block_size}, drafted in one forward; expected at most {USUAL}")
    layer = getattr(settings, "layer", None)
    sizes = {name: size for name in RANKS if (size := getattr(settings, name, None)) is not None}
    if layer is not None:
        heads = max(layer.num_heads or 1, layer.num_key_value_heads or 1)
        sizes |= {"layer.mlp_width": layer.mlp_width or 1, "layer.num_heads x head_width": heads * (layer.head_width or 1)}
    for name, size in sizes.items():
        if size * width > _total(shapes):
            raise InputError(f"{where}: {name} is {size}, and one such matrix is larger than all the weights beside it")


@contextmanager
def no_larger_than(shapes: Shapes, where: str | Path) -> Iterator[None]:
    """Stop the building of a module as soon as it has more numbers than its stored tensors can fill.

    Raises:
        InputError: it has.
    """
    built, limit = 0, SLACK * _total(shapes)

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal built
        built += 0 if parameter is None else parameter.numel()
        if built > limit:
            raise InputError(f"{where}: its settings call for more weights than the {_total(shapes)} numbers that are stored")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def check_causal_lm(folder: Path) -> None:
    """Refuse a causal LM whose config calls for more weights than its folder holds; built on torch's `meta` device only.

    Raises:
        InputError: it does, or it holds no readable weights or config.
        OSError, ValueError, KeyError: transformers knows no such model.
    """
    shapes = {name: stored.shape for name, stored in read_float_weights(folder).items()}
    where = folder / "config.json"
    config = read_json(where, "config of the draft")
    check_counts(config if isinstance(config, dict) else {}, shapes, where)
    known = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"), no_larger_than(shapes, where):
        model = AutoModelForCausalLM.from_config(known, trust_remote_code=False)
    model.tie_weights()
    needed = sum(parameter.numel() for parameter in model.parameters())
    if needed > _total(shapes):
        raise InputError(f"{where} calls for {needed} weights, while {_total(shapes)} numbers are stored")


def _total(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())

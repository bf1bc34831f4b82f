"""Limits on what a draft's settings may build, given the tensors that are stored beside them.

The settings of a file of a few kilobytes can name a million layers. Only the header of its weights is read here.
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
from heads.frozen.quantized import read_float_weights

Shapes = Mapping[str, tuple[int, ...]]

COUNTS = re.compile(r"(layers?|depths|(medusa|hydra)_num_heads)$")
USUAL = 256  # layers or depths that settings may name whatever the number of tensors: some layers share theirs
SLACK = 4  # numbers built for one stored: tied matrices are built twice, and joined ones apart
NO_MEMORY = ("allocate", "overflow")  # in torch's errors where a matrix is too large for any memory


def check_counts(settings: Mapping[str, Any], shapes: Shapes, where: str | Path) -> None:
    """Refuse settings that name more layers or depths than there are tensors, or too long a block, in sections of theirs too.

    Raises:
        InputError: names the key.
    """
    for key, value in settings.items():
        if isinstance(value, Mapping):
            check_counts(value, shapes, where)
        elif not isinstance(value, int | float):
            continue
        elif COUNTS.search(key) and value > max(USUAL, len(shapes)):
            raise InputError(f"{where}: {key} is {value:g}, while the weights beside it hold {len(shapes)} tensors")
        elif key == "block_size" and value > USUAL:
            raise InputError(f"{where}: block_size is {value}, drafted in one forward; expected at most {USUAL}")


@contextmanager
def no_larger_than(shapes: Shapes, where: str | Path) -> Iterator[None]:
    """Stop the building of a module as soon as it has more numbers than its stored tensors can fill.

    A matrix is counted before its values are set, while it takes no memory yet.

    Raises:
        InputError: it has.
    """
    built, total = 0, _total(shapes)
    too_large = InputError(f"{where}: its settings call for more weights than the {total} numbers that are stored")

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal built
        built += 0 if parameter is None else parameter.numel()
        if built > SLACK * total:
            raise too_large

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    except torch.OutOfMemoryError:  # of a device that is full
        raise
    except RuntimeError as error:
        if any(word in str(error) for word in NO_MEMORY):
            raise too_large from error
        raise
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

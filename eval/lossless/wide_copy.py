"""A copy of the target in the next wider dtype, by which the rounding of its own dtype is measured.

Quantised targets are ordinary matrices here and are copied like others. A target that is spread over devices or split over
processes is loaded anew, placed by the same settings.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from heads.device import CPU, free_memory, widest_float
from heads.frozen.loading import Target, load_target
from heads.inference.guidance import Guidance
from heads.inference.runner import runner_of

log = logging.getLogger("draftsmith")

FILLED = 0.9  # of the free memory, by the copy; what it computes takes some too


def widened(target: Target) -> Target:
    """Return the target in float32 where it is in 16 bits, in float64 where it is in float32; itself in float64."""
    dtype = target.model.dtype
    wider = torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64
    if dtype == wider:
        return target
    if target.spread_by is not None:
        return load_target(target.spread_by.model_copy(update={"dtype": str(wider).removeprefix("torch.")}))
    home = home_of_copy(target, wider)
    # Each weight is copied straight to where it goes: a whole copy in the old dtype would take half as much again beside it.
    weights = [each for each in target.model.parameters() if each.is_floating_point()]
    copies: dict[int, Any] = {id(each): nn.Parameter(each.detach().to(home, wider, copy=True), False) for each in weights}
    copied = copy.deepcopy(target.model, copies)
    nn.Module.to(copied, device=home, dtype=wider)  # transformers wraps `to` in a way that type checkers cannot follow
    if (guidance := target.runner.guidance) is not None:
        runner_of(copied).guidance = Guidance.of(copied, guidance.config)
    media = None if target.media is None else replace(target.media, model=copied)
    return replace(target, model=copied, media=media)


def home_of_copy(target: Target, dtype: torch.dtype) -> torch.device:
    """Return the target's device, or the CPU where that has no room for a copy in `dtype` or no such dtype."""
    needed, free = sum(each.numel() for each in target.model.parameters()) * dtype.itemsize, free_memory(target.device)
    if dtype == torch.float64 and widest_float(target.device) != dtype:
        return CPU
    if free is None or needed <= FILLED * free:
        return target.device
    log.warning(
        "losslessness is checked with a copy of the target in %s, %.1f GB, and %s has %.1f GB free: the copy runs on the CPU, "
        "which may take long",
        *(str(dtype).removeprefix("torch."), needed / 1e9, target.device, free / 1e9),
    )
    return CPU

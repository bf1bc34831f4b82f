"""Noise on the target's tapped states while a head is trained: with few data it learns them by heart otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

from heads.target_states import TargetStates


def with_noise(states: TargetStates, half_width: float) -> TargetStates:
    """Return states with uniform noise on every tap, from torch's own generator; the final state stays as it is.

    Args:
        states: the target's.
        half_width: of the noise, in units of each tap's root mean square at its position; 0 for none.
    """
    if half_width == 0:
        return states
    return TargetStates(final_BTE=states.final_BTE, taps_ABTE=tuple(_noisy(tap, half_width) for tap in states.taps_ABTE))


def _noisy(tap_BTE: Tensor, half_width: float) -> Tensor:
    tap_BTE = tap_BTE.to(torch.promote_types(tap_BTE.dtype, torch.float32))
    scale_BT1 = tap_BTE.square().mean(-1, keepdim=True).sqrt()
    return tap_BTE + scale_BT1 * (torch.rand_like(tap_BTE) * 2 - 1) * half_width

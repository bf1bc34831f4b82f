"""A key-value cache in int8: half the memory of half precision, at a small change of the target's distribution.

Each head's vector at each position has a float32 scale, its largest magnitude divided by 127; the error is at most half a step.
Attention reads the rounded values of a forward's own tokens too, so that speculative decoding gives the answers of plain
decoding with the same cache. `docs/decoding.md` has the measured change. Left out on purpose: attention on int8 itself; keys
and values are converted back when read, which takes time and, one layer at a time, a full layer's memory.
B batch, N key-value heads, T new tokens, S cache length, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from heads.inference.kv_cache import RowLayer

STEPS = 127


class Int8Layer(RowLayer):
    """One layer's keys and values in int8 `[B, N, capacity, H]`, and their scales in float32 `[B, N, capacity, 1]`."""

    stored: Sequence[str] = ("keys", "values", "key_scales", "value_scales")
    key_scales: Tensor
    value_scales: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        B, N, _, H = key_states.shape
        self.keys = key_states.new_zeros(B, N, self.capacity, H, dtype=torch.int8)
        self.values = value_states.new_zeros(B, N, self.capacity, value_states.shape[-1], dtype=torch.int8)
        self.key_scales = key_states.new_zeros(B, N, self.capacity, 1, dtype=torch.float32)
        self.value_scales = torch.zeros_like(self.key_scales)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write the new states, rounded, and return everything up to the furthest row's end in their dtype."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._write(self.keys, self.key_scales, key_states)
        self._write(self.values, self.value_scales, value_states)
        end, dtype = self.slots.end, key_states.dtype
        keys_BNSH = dequantise(self.keys[:, :, :end], self.key_scales[:, :, :end], dtype)
        return keys_BNSH, dequantise(self.values[:, :, :end], self.value_scales[:, :, :end], dtype)

    def _write(self, store: Tensor, scales: Tensor, states_BNTH: Tensor) -> None:
        rounded_BNTH, scales_BNT1 = quantise(states_BNTH)
        self._written(store, rounded_BNTH)
        self._written(scales, scales_BNT1)


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise vectors `[..., H]` to int8, with scales `[..., 1]` in float32.

    A vector with a NaN or infinity has a scale that is not finite, and reads as NaN; one of zeros stays so.
    """
    wide = values.float()
    scales = wide.abs().amax(-1, keepdim=True) / STEPS
    steps = torch.where(torch.isfinite(scales) & (scales > 0), wide / scales, 0.0)
    return steps.round().to(torch.int8), scales


def dequantise(steps: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return int8 vectors `[..., H]` times their scales, as `dtype`."""
    return (steps * scales).to(dtype)


LAYERS: Mapping[Literal["int8"] | None, Callable[[int], RowLayer]] = {None: RowLayer, "int8": Int8Layer}

"""Memory that the caches of one model hand on, so that in every batch CUDA graphs find it at the same addresses."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import finalize

import torch
from torch import Tensor


class Storage:
    """What the caches before have left, by the name of the tensor and all of its shape but the number of rows."""

    def __init__(self) -> None:
        self._free: dict[object, Tensor] = {}

    def zeros(self, owner: object, name: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros that are the owner's as long as it lives, in what was left if that has enough rows."""
        key = (name, tuple(shape[1:]), dtype, device)
        rows = self._free.pop(key, None)
        if rows is None or len(rows) < shape[0]:
            rows = torch.empty(*shape, dtype=dtype, device=device)
        finalize(owner, self._free.__setitem__, key, rows).atexit = False
        return rows[: shape[0]].zero_()

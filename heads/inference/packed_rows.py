"""Whether the rows of a forward hold several documents each, told to transformers.

To make its masks it would look that up in the positions (`masking_utils.find_packed_sequence_indices`), and the host would wait
for the device in every forward. Elsewhere its own function decides as before.
B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor
from transformers import masking_utils

_PACKED: ContextVar[bool | None] = ContextVar("packed", default=None)  # of this thread; None: not known


@contextmanager
def knowing_packing(*, packed: bool) -> Iterator[None]:
    """Say for the `with` block whether some row holds several documents, which positions from 0 in each tell apart."""
    _listen()
    token = _PACKED.set(packed)
    try:
        yield
    finally:
        _PACKED.reset(token)


@cache
def _listen() -> None:
    own: Callable[[Tensor], Tensor | None] = masking_utils.find_packed_sequence_indices

    def find(position_ids: Tensor) -> Tensor | None:
        known = _PACKED.get()
        if known is None:
            return own(position_ids)
        return _documents(position_ids) if known else None

    masking_utils.find_packed_sequence_indices = find


def _documents(positions_BT: Tensor) -> Tensor:
    """Return the number of each position's document in its row, from 0, as transformers computes it."""
    steps_BT = torch.diff(positions_BT, prepend=positions_BT[:, :1] - 1, dim=-1)
    return (steps_BT != 1).cumsum(-1)

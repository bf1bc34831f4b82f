"""Whether the rows of a forward hold several documents each, told to transformers.

To make its masks it would look that up in the positions (`masking_utils.find_packed_sequence_indices`), and the host would wait
for the device in every forward. Elsewhere its own function decides as before.
B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

import torch
from torch import Tensor
from transformers import masking_utils

_PACKED: ContextVar[bool | None] = ContextVar("packed", default=None)  # of this thread; None: not known
_OWN = masking_utils.find_packed_sequence_indices
_LOCK, _num_blocks = Lock(), 0  # `with` blocks entered and not left, in all threads


@contextmanager
def knowing_packing(*, packed: bool) -> Iterator[None]:
    """Say for the `with` block whether some row holds several documents, which positions from 0 in each tell apart."""
    token = _PACKED.set(packed)
    _count_blocks(1)
    try:
        yield
    finally:
        _count_blocks(-1)
        _PACKED.reset(token)


def _count_blocks(change: int) -> None:
    """Stand in for transformers' function while any thread is in such a block, and put it back after the last."""
    global _num_blocks
    with _LOCK:
        _num_blocks += change
        masking_utils.find_packed_sequence_indices = _find if _num_blocks else _OWN


def _find(position_ids: Tensor) -> Tensor | None:
    known = _PACKED.get()
    if known is None:
        return _OWN(position_ids)
    return _documents(position_ids) if known else None


def _documents(positions_BT: Tensor) -> Tensor:
    """Return the number of each position's document in its row, from 0, as transformers computes it."""
    steps_BT = torch.diff(positions_BT, prepend=positions_BT[:, :1] - 1, dim=-1)
    return (steps_BT != 1).cumsum(-1)

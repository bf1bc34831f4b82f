"""Integers that the host knows and a device needs: all of a round's reach it in one copy.

A copy is put off until one of its numbers is read on the device, and what else was added by then goes along. An integer a row
that both sides have is a `RowNumbers`; of a plain list, `on_device` makes a copy by itself.
B batch, T columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from heads.device import same_device, to_device


class Uploads:
    """Integers on their way to a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._waiting: list[Upload] = []

    def rows(self, rows: Sequence[Sequence[int]], fill: int = 0) -> Upload:
        """Add rows of integers, which become `[B, T]`; shorter ones are filled up at their ends."""
        width = max(map(len, rows), default=0)
        return self._added([number for row in rows for number in (*row, *[fill] * (width - len(row)))], (len(rows), width))

    def numbers(self, values: Sequence[int]) -> RowNumbers:
        """Add an integer a row."""
        upload = self._added(list(values), (len(values),))
        return RowNumbers(values, self.device, lambda: upload.tensor)

    def send(self) -> None:
        """Copy what was added since the last time."""
        waiting, self._waiting = self._waiting, []
        sent = to_device([number for upload in waiting for number in upload.values], self.device)
        for upload, part in zip(waiting, sent.split([len(upload.values) for upload in waiting]), strict=True):
            upload.sent = part.view(upload.shape)

    def _added(self, values: list[int], shape: tuple[int, ...]) -> Upload:
        self._waiting.append(Upload(self, values, shape))
        return self._waiting[-1]


class Upload:
    """Some of the integers of `Uploads`."""

    def __init__(self, uploads: Uploads, values: list[int], shape: tuple[int, ...]) -> None:
        self.values, self.shape = values, shape
        self.sent: Tensor | None = None
        self._uploads = uploads

    @property
    def tensor(self) -> Tensor:
        """The integers on the device, int64; sent there now if they are not yet."""
        if self.sent is None:
            self._uploads.send()
        assert self.sent is not None, "an upload waits until it is sent"
        return self.sent


class RowNumbers(list[int]):
    """An integer a row of the batch, on the host and on a device.

    Args:
        values: on the host.
        make: returns the same as a tensor `[B]`, int64; called when that is first read.
    """

    def __init__(self, values: Sequence[int], device: torch.device, make: Callable[[], Tensor]) -> None:
        super().__init__(values)
        self.device, self._make = device, make
        self._tensor_B: Tensor | None = None

    @classmethod
    def alike(cls, value: int, num_rows: int, device: torch.device) -> RowNumbers:
        """Return the same integer for each row."""
        return cls([value] * num_rows, device, lambda: torch.full((num_rows,), value, device=device))

    @property
    def tensor_B(self) -> Tensor:
        """The integers on the device."""
        if self._tensor_B is None:
            self._tensor_B = self._make()
        return self._tensor_B


class TokenRows(list[Sequence[int]]):
    """The committed tokens by row, the pending one last, and what of them a round's forwards need on the device."""

    def __init__(self, rows: Sequence[Sequence[int]], device: torch.device) -> None:
        super().__init__(rows)
        self.uploads = Uploads(device)
        self.lengths = self.uploads.numbers([len(row) for row in rows])
        self._pending = self.uploads.rows([row[-1:] for row in rows])

    @property
    def pending_B1(self) -> Tensor:
        """Each row's last token."""
        return self._pending.tensor


def token_rows(tokens: Sequence[Sequence[int]], device: torch.device) -> TokenRows:
    """Return committed tokens as a text for this device; the decoder's own is one already."""
    return tokens if isinstance(tokens, TokenRows) and same_device(tokens.uploads.device, device) else TokenRows(tokens, device)


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Return integers `[B]` on a device; only those that it does not have are copied."""
    if isinstance(values, RowNumbers) and same_device(values.device, device):
        return values.tensor_B
    return to_device(list(values), device)


def shifted(values: Sequence[int], by: int) -> list[int]:
    """Return integers by row with `by` added to each."""
    moved = [value + by for value in values]
    return RowNumbers(moved, values.device, lambda: values.tensor_B + by) if isinstance(values, RowNumbers) else moved


def smaller(values: Sequence[int], others: RowNumbers) -> RowNumbers:
    """Return the smaller one of two integers, by row."""
    device = others.device
    return RowNumbers(
        [min(pair) for pair in zip(values, others, strict=True)],
        device,
        lambda: torch.minimum(on_device(values, device), others.tensor_B),
    )


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...] | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values that are the same in every round as a tensor, which is kept on the device and must not be changed."""
    with torch.inference_mode(mode=False):
        return torch.tensor(values, dtype=dtype, device=device)

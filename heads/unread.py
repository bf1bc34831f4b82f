"""States that the target has handed over and the head has not read yet, row by row.

The decoder hands states over when they are known; the token that goes with the last of them, the target's own, only shows
in the next round. So families keep them here until then. B batch, T positions, F width of what a family keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Unread:
    """Features of positions `first[b]` to `first[b] + count[b] - 1` of each row.

    Args:
        features_BTF: right-padded.
        counts: how many of each row are valid.
    """

    def __init__(self, features_BTF: Tensor, counts: Sequence[int]) -> None:
        self.first = [0] * len(counts)
        self.counts = list(counts)
        self.features_BTF = features_BTF[:, : max(counts)]

    def replace(self, features_BTF: Tensor, counts: Sequence[int]) -> None:
        """Take what follows the features held so far, which have been read."""
        self.first = self.ends
        self.counts = list(counts)
        self.features_BTF = features_BTF[:, : max(counts)]

    @property
    def ends(self) -> list[int]:
        """The position after the last one, by row."""
        return [first + count for first, count in zip(self.first, self.counts, strict=True)]

    @property
    def last_B(self) -> Tensor:
        """The column of each row's last feature."""
        return torch.tensor(self.counts, device=self.features_BTF.device) - 1

    def next_tokens(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Return the ids `[B, T]` of the token after each feature's position; 0 on padding."""
        width = self.features_BTF.shape[1]
        rows = [list(row[first + 1 : end + 1]) for row, first, end in zip(tokens, self.first, self.ends, strict=True)]
        padded = [row + [0] * (width - len(row)) for row in rows]
        return torch.tensor(padded, device=self.features_BTF.device)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""
        self.features_BTF = self.features_BTF[torch.tensor(rows, device=self.features_BTF.device)]
        self.counts = [self.counts[row] for row in rows]
        self.first = [self.first[row] for row in rows]

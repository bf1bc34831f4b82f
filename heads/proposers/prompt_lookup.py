"""Prompt lookup: draft what followed the previous occurrence of the last few tokens in the text. No model, no training.

A baseline for trained drafts (A. Saxena, 2023). The longest match wins, the latest among equals; an index of
n-grams grows with the text, so a round costs a few dictionary look-ups and no scan.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import torch

from heads.frozen.hidden_states import TargetStates
from heads.proposers.protocol import LooksUp, Tokens


class PromptLookup(LooksUp):
    """Prompt lookup as a proposer.

    Args:
        longest, shortest: tokens in the longest n-gram looked up; shorter ones down to `shortest` are tried when it has not
            occurred.
    """

    def __init__(self, device: torch.device, longest: int = 3, shortest: int = 1) -> None:
        super().__init__(device)
        self.longest, self.shortest = longest, shortest
        self._indices: list[dict[tuple[int, ...], int]] = []  # by row: n-gram -> position after its latest occurrence
        self._indexed: list[int] = []  # by row: positions whose n-grams are in the index

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self._indices = [{} for _ in tokens]
        self._indexed = [0] * len(tokens)

    def look_up(self, tokens: Tokens, num_tokens: int) -> list[list[int]]:
        return [self._continue(row, number, num_tokens) for number, row in enumerate(tokens)]

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._indices = [self._indices[row] for row in rows]
        self._indexed = [self._indexed[row] for row in rows]

    def _continue(self, row: Sequence[int], number: int, num_tokens: int) -> list[int]:
        index = self._indices[number]
        # The n-grams that end with the last token have no successor yet, so they are left for the next round.
        for end in range(self._indexed[number] + 1, len(row)):
            for size in range(self.shortest, min(self.longest, end) + 1):
                index[tuple(row[end - size : end])] = end
        self._indexed[number] = len(row) - 1
        for size in range(min(self.longest, len(row)), self.shortest - 1, -1):
            if (found := index.get(tuple(row[len(row) - size :]))) is not None:
                copied = list(row[found : found + num_tokens])
                # A match that overlaps itself is a text that repeats: it is copied on from what was copied.
                return list(islice(cycle(copied), num_tokens))
        return []

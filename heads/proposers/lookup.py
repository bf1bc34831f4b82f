"""Drafts copied from texts that were seen before: no model, no training; baselines for trained drafts, and drafts before them.

`PromptLookup` continues the latest occurrence of the last few tokens in the same text (A. Saxena, 2023). `SuffixLookup` drafts
by what followed every suffix of the text, there and in earlier answers (`heads.proposers.suffixes`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import cycle, islice

import torch

from heads.device import Rows, on_host
from heads.frozen.hidden_states import TargetStates
from heads.proposers.protocol import LooksUp, Tokens
from heads.proposers.suffixes import SuffixText, automaton_of

MEMORY_TOKENS = 100_000  # of answers that were learnt, the newest


class PromptLookup(LooksUp):
    """Prompt lookup as a proposer: the longest match wins, of `longest` down to `shortest` tokens, the latest among equals."""

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

    def keep_rows(self, rows: Rows) -> None:
        kept = on_host(rows)
        self._indices = [self._indices[row] for row in kept]
        self._indexed = [self._indexed[row] for row in kept]

    def _continue(self, row: Sequence[int], number: int, num_tokens: int) -> list[int]:
        index = self._indices[number]
        # The n-grams that end with the last token have no successor yet, so they are left for the next round.
        for end in range(self._indexed[number] + 1, len(row)):
            for size in range(self.shortest, min(self.longest, end) + 1):
                index[tuple(row[end - size : end])] = end
        self._indexed[number] = len(row) - 1
        for size in range(min(self.longest, len(row)), self.shortest - 1, -1):
            if (found := index.get(tuple(row[len(row) - size :]))) is not None:
                # A match that overlaps itself is a text that repeats: it is copied on from what was copied.
                return list(islice(cycle(row[found : found + num_tokens]), num_tokens))
        return []


class SuffixLookup(LooksUp):
    """Suffix lookup as a proposer (`heads.proposers.protocol.LearningProposer`). The memory is kept from batch to batch.

    Decoding a prompt again copies its answer once `learn` was given that.

    Args:
        answers: token ids of answers that are known from the start, and never forgotten.
        min_expected: the number of drafts that must be expected to be accepted, by their probabilities, for any to be made.
    """

    def __init__(self, device: torch.device, answers: Iterable[Sequence[int]] = (), *, min_expected: float = 0.0) -> None:
        super().__init__(device)
        self.min_expected = min_expected
        self._known = list(answers)
        self._answers: deque[list[int]] = deque()
        self._num_remembered = 0
        self._rows: list[SuffixText] = []
        self._memory = automaton_of(self._known)

    def learn(self, answer: Sequence[int]) -> None:
        """Add the tokens of an answer to the memory. Must not be called while a batch is being decoded."""
        self._answers.append(list(answer))
        self._num_remembered += len(answer)
        if self._num_remembered <= MEMORY_TOKENS:
            self._memory.add(self._answers[-1])
            return
        while self._num_remembered > MEMORY_TOKENS // 2:  # half of them, so that the memory is seldom rebuilt
            self._num_remembered -= len(self._answers.popleft())
        self._memory = automaton_of([*self._known, *self._answers])

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self._rows = [SuffixText(self._memory) for _ in tokens]

    def look_up(self, tokens: Tokens, num_tokens: int) -> list[list[int]]:
        found = []
        for row, text in zip(self._rows, tokens, strict=True):
            row.read(text[row.num_read :])
            drafts, expected = row.drafts(num_tokens)
            found.append(drafts if expected >= self.min_expected else [])
        return found

    def keep_rows(self, rows: Rows) -> None:
        self._rows = [self._rows[row] for row in on_host(rows)]

"""Suffix lookup: draft what most often followed the longest suffix of the text that occurred before. No model, no training.

It occurred in the same text, prompt included, or in answers to earlier requests; the longer match is continued token by token,
each time by the most frequent one (SuffixDecoding, arXiv 2411.04975, with a chain in place of its tree).

**When measuring**: once a prompt was decoded its answer is in memory, and decoding it again copies it. Set `learns_own_answers`
to False and call `learn` when that prompt is done, as `eval.measure.interleaved` does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from heads.frozen.hidden_states import TargetStates
from heads.proposers.protocol import LooksUp, Tokens
from heads.proposers.suffix_automaton import ROOT, Match, SuffixAutomaton

NOTHING = Match(ROOT, 0)


@dataclass
class _Row:
    """One text being decoded, as far as it was read by the last `propose`."""

    prompt_length: int
    text: list[int] = field(default_factory=list)
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    end: int = ROOT  # the state of `own` where the text ends
    past: Match = NOTHING  # the text's longest suffix in the memory

    @property
    def answer(self) -> list[int]:
        """The answer without the tokens of the last round, which were not read."""
        return self.text[self.prompt_length :]


class SuffixLookup(LooksUp):
    """Suffix lookup as a proposer. The memory is kept from batch to batch.

    Args:
        shortest: tokens that a match needs.
        min_share: a draft ends before the token that makes its probability, by the counts, less than this.
        drafts_per_matched: the most drafts for each token of the match, rounded up: longer matches agree for longer.
        memory_tokens: how many tokens of earlier answers are kept, the newest; 0: none.
        learns_own_answers: add the answers of a batch to the memory when the next one starts; otherwise only `learn` adds.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        shortest: int = 1,
        min_share: float = 0.1,
        drafts_per_matched: float = 2.0,
        memory_tokens: int = 100_000,
        learns_own_answers: bool = True,
    ) -> None:
        super().__init__(device)
        self.shortest, self.learns_own_answers = shortest, learns_own_answers
        self.min_share, self.drafts_per_matched, self.memory_tokens = min_share, drafts_per_matched, memory_tokens
        self._memory = SuffixAutomaton()
        self._answers: deque[list[int]] = deque()
        self._num_remembered = 0
        self._rows: list[_Row] = []
        self._ended: list[_Row] = []  # rows of this batch that have finished

    def learn(self, answer: Sequence[int]) -> None:
        """Add the tokens of an answer to the memory. Must not be called while a batch is being decoded."""
        if self.memory_tokens == 0:
            return
        self._answers.append(list(answer))
        self._num_remembered += len(answer)
        self._index(self._answers[-1])
        if self._num_remembered > self.memory_tokens:
            self._drop_oldest()

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        for row in [*self._ended, *self._rows] if self.learns_own_answers else ():
            self.learn(row.answer)
        self._ended = []
        self._rows = [_Row(prompt_length=len(row) - 1) for row in tokens]

    def look_up(self, tokens: Tokens, num_tokens: int) -> list[list[int]]:
        for row, text in zip(self._rows, tokens, strict=True):
            self._read(row, text[len(row.text) :])
        return [self._continue(row, num_tokens) for row in self._rows]

    def keep_rows(self, rows: Sequence[int]) -> None:
        staying = set(rows)
        self._ended += [row for number, row in enumerate(self._rows) if number not in staying]
        self._rows = [self._rows[row] for row in rows]

    def _read(self, row: _Row, tokens: Sequence[int]) -> None:
        for token in tokens:
            row.end = row.own.extend(row.end, token)
            row.past = self._memory.follow(row.past, token)
        row.text += tokens

    def _continue(self, row: _Row, num_tokens: int) -> list[int]:
        own = row.own.continued(row.own.longest(row.end))
        past = self._memory.continued(row.past)
        if past.length > own.length:
            return self._walk(self._memory, past, num_tokens)
        return self._walk(row.own, own, num_tokens)

    def _walk(self, automaton: SuffixAutomaton, match: Match, num_tokens: int) -> list[int]:
        if match.length < self.shortest:
            return []
        drafts: list[int] = []
        share = 1.0
        longest = min(num_tokens, math.ceil(match.length * self.drafts_per_matched))
        while len(drafts) < longest and (following := automaton.most_frequent(match.state)) is not None:
            share *= following.share
            if share < self.min_share:
                break
            drafts.append(following.token)
            match = automaton.continued(automaton.longest(following.state))
            if match.length == 0:
                break
        return drafts

    def _index(self, answer: Sequence[int]) -> None:
        end = ROOT
        for token in answer:
            end = self._memory.extend(end, token)

    def _drop_oldest(self) -> None:
        """Keep the newest answers with half of `memory_tokens`, so that the memory is seldom rebuilt."""
        while self._answers and self._num_remembered > self.memory_tokens // 2:
            self._num_remembered -= len(self._answers.popleft())
        self._memory = SuffixAutomaton()
        for answer in self._answers:
            self._index(answer)

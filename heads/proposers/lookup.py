"""Drafts copied from texts that were seen before: no model, no training; baselines for trained drafts, and drafts before them.

`PromptLookup` continues the latest occurrence of the last few tokens in the same text (A. Saxena, 2023). `SuffixLookup` counts
what followed each suffix of the text, in that text and in earlier answers, and interpolates the counts of all suffixes by the
weights of Witten and Bell (1991, method C). SuffixDecoding (arXiv 2411.04975) drafts from the longest suffix alone.

A suffix automaton (Blumer et al. 1985) is the smallest one that accepts all substrings of some texts: a state stands for the
substrings that end at the same positions, and its suffix link leads to the longest of their suffixes that ends at more.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import NamedTuple

import torch

from heads.frozen.hidden_states import TargetStates
from heads.proposers.protocol import LooksUp, Tokens

MIN_PROBABILITY = 0.2  # a draft of suffix lookup ends before the token that makes its probability less
OWN_WEIGHT = 3.0  # of what the text itself holds, beside earlier answers
MAX_SUFFIX = 8  # tokens of a suffix that is told from longer ones
LIKELIEST = 8  # tokens after a suffix that are considered, those of the highest counts
MEMORY_TOKENS = 100_000  # of answers that were learnt, the newest
# A token is counted for this many suffixes, longest first. Text has a handful of them, one token repeated n times has n; there
# the shortest are not counted again and again, and n tokens do not cost n * n.
MAX_COUNTED = 64
ROOT = 0  # the state of the empty substring


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
        self._rows: list[_Row] = []
        self._remember(self._known)

    def learn(self, answer: Sequence[int]) -> None:
        """Add the tokens of an answer to the memory. Must not be called while a batch is being decoded."""
        self._answers.append(list(answer))
        self._num_remembered += len(answer)
        if self._num_remembered <= MEMORY_TOKENS:
            self._memory.add(self._answers[-1])
            return
        while self._num_remembered > MEMORY_TOKENS // 2:  # half of them, so that the memory is seldom rebuilt
            self._num_remembered -= len(self._answers.popleft())
        self._remember([*self._known, *self._answers])

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self._rows = [_Row() for _ in tokens]

    def look_up(self, tokens: Tokens, num_tokens: int) -> list[list[int]]:
        return [self._continue(row, text, num_tokens) for row, text in zip(self._rows, tokens, strict=True)]

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def _remember(self, answers: Iterable[Sequence[int]]) -> None:
        self._memory = SuffixAutomaton()
        for answer in answers:
            self._memory.add(answer)

    def _continue(self, row: _Row, text: Sequence[int], num_tokens: int) -> list[int]:
        for token in text[row.num_read :]:
            row.end = row.own.extend(row.end, token)
            row.past = self._memory.follow(row.past, token)
        row.num_read = len(text)
        own, past = row.own.cut(row.own.longest(row.end)), row.past
        drafts: list[int] = []
        probability, expected = 1.0, 0.0
        while len(drafts) < num_tokens:
            probs = interpolated(row.own.contexts(own), self._memory.contexts(past))
            token = max(probs, key=probs.__getitem__, default=-1)
            probability *= probs.get(token, 0.0)
            if probability < MIN_PROBABILITY:
                break
            drafts.append(token)
            expected += probability
            own, past = row.own.follow(own, token), self._memory.follow(past, token)
        return drafts if expected >= self.min_expected else []


def interpolated(own: Iterable[Context], past: Iterable[Context]) -> dict[int, float]:
    """Return the probabilities of the likeliest next tokens, by the suffixes of a text in itself and in earlier answers.

    From the shortest suffix to the longest, n tokens after one of which d are different give its shares the weight n / (n + d),
    and the shorter suffixes the rest. Those of the text itself count `OWN_WEIGHT` times.
    """
    probs: dict[int, float] = {}
    weighted = [*((each.length, 1.0, each) for each in past), *((each.length, OWN_WEIGHT, each) for each in own)]
    for _, weight, context in sorted(weighted, key=lambda each: each[:2]):
        share = weight * context.total / (weight * context.total + context.num_distinct)
        probs = {token: (1 - share) * prob for token, prob in probs.items()}
        for token, count in context.likeliest:
            probs[token] = probs.get(token, 0.0) + share * count / context.total
    return probs


class Match(NamedTuple):
    """A substring that occurs: the state it belongs to and its length in tokens."""

    state: int
    length: int


NOTHING = Match(ROOT, 0)


class Context(NamedTuple):
    """What followed a suffix of a text."""

    length: int  # of the suffix, at most `MAX_SUFFIX`
    total: int  # tokens that followed it
    num_distinct: int
    likeliest: Sequence[tuple[int, int]]  # tokens and their counts, the highest first, the latest of equal ones


class SuffixAutomaton:
    """All substrings of some texts of tokens, with the count and the latest occurrence of each.

    Texts grow a token at a time, several of them side by side; a token costs a few dictionary operations, whatever the length
    of the texts, and at most two states. States are numbers; the empty substring is `ROOT`.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest substring of a state
        self._count = [0]  # how often its substrings occur
        self._latest = [0]  # when one last occurred
        self._clock = 0
        self._following: dict[int, tuple[int, int, list[tuple[int, int]]]] = {}  # parts of contexts that were asked for

    def __len__(self) -> int:
        return len(self._next)

    def add(self, text: Sequence[int]) -> None:
        """Add a whole text."""
        end = ROOT
        for token in text:
            end = self.extend(end, token)

    def extend(self, end: int, token: int) -> int:
        """Append a token to the text that ends in state `end`, `ROOT` for a new text; return the state where it now ends."""
        state = end = self._append(end, token)
        self._clock += 1
        self._following.clear()
        for _ in range(MAX_COUNTED):
            if state == ROOT:
                break
            self._count[state] += 1
            self._latest[state] = self._clock
            state = self._link[state]
        return end

    def follow(self, match: Match, token: int) -> Match:
        """Return the longest suffix of a substring and this token that occurs."""
        state, length = match
        while token not in self._next[state]:
            if state == ROOT:
                return NOTHING
            state = self._link[state]
            length = self._length[state]
        return Match(self._next[state][token], length + 1)

    def longest(self, state: int) -> Match:
        """Return the longest substring of a state; of the state where a text ends that is the whole text."""
        return Match(state, self._length[state])

    def cut(self, match: Match) -> Match:
        """Return the last `MAX_SUFFIX` tokens of a substring."""
        state, length = match
        while state != ROOT and self._length[self._link[state]] >= MAX_SUFFIX:
            state = self._link[state]
        return Match(state, min(length, self._length[state]))

    def contexts(self, match: Match) -> Iterator[Context]:
        """Yield what followed the suffixes of a substring, each set of suffixes that end at the same places once."""
        state, length = self.cut(match)
        while state != ROOT:
            total, num_distinct, likeliest = self._after(state)
            if total:
                yield Context(min(length, MAX_SUFFIX), total, num_distinct, likeliest)
            state = self._link[state]
            length = self._length[state]

    def _after(self, state: int) -> tuple[int, int, list[tuple[int, int]]]:
        if state not in self._following:
            counts = [(self._count[after], self._latest[after], token) for token, after in self._next[state].items()]
            likeliest = [(token, count) for count, _, token in heapq.nlargest(LIKELIEST, counts)]
            self._following[state] = sum(count for count, _, _ in counts), len(counts), likeliest
        return self._following[state]

    def _append(self, end: int, token: int) -> int:
        if token in self._next[end]:  # another text has this prefix
            return self._exactly(end, token)
        new = self._new_state(self._length[end] + 1, {})
        state = end
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = ROOT if state == -1 else self._exactly(state, token)
        return new

    def _exactly(self, state: int, token: int) -> int:
        """Return the state whose longest substring is that of `state` and the token, split off from one of longer ones."""
        after = self._next[state][token]
        if self._length[after] == self._length[state] + 1:
            return after
        split = self._new_state(self._length[state] + 1, dict(self._next[after]))
        self._link[split], self._link[after] = self._link[after], split
        self._count[split], self._latest[split] = self._count[after], self._latest[after]
        while state != -1 and self._next[state].get(token) == after:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _new_state(self, length: int, following: dict[int, int]) -> int:
        self._next.append(following)
        self._link.append(ROOT)
        self._length.append(length)
        self._count.append(0)
        self._latest.append(0)
        return len(self._next) - 1


@dataclass
class _Row:
    """One text being decoded, as far as it was read."""

    num_read: int = 0
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    end: int = ROOT  # the state of `own` where the text ends
    past: Match = NOTHING  # the text's longest suffix in the memory

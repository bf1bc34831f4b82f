"""What followed each suffix of a text, in that text and in earlier answers: a text model that is counted, not trained.

The counts of all suffixes are interpolated by the weights of Witten and Bell (1991, method C), where SuffixDecoding (arXiv
2411.04975) drafts from the longest suffix alone. The file needs nothing but Python: exports take it along
(`heads.formats.exporting.exporter`).

A suffix automaton (Blumer et al. 1985) is the smallest one that accepts all substrings of some texts: a state stands for the
substrings that end at the same positions, and its suffix link leads to the longest of their suffixes that ends at more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

MIN_PROBABILITY = 0.2  # a chain ends before the draft that makes its probability less
OWN_WEIGHT = 3.0  # of what the text itself holds, beside earlier answers
MAX_SUFFIX = 8  # tokens of a suffix that is told from longer ones
NEGLIGIBLE = 1e-3  # probability that shorter suffixes would share
LIKELIEST = 8  # tokens after a suffix that are considered, those of the highest counts
KNOWN_TOKENS = 1_000_000  # of answers that are known from the start: four seconds, and half a gigabyte
# A token is counted for this many suffixes, longest first. Text has a handful of them, one token repeated n times has n; there
# the shortest are not counted again and again, and n tokens do not cost n * n.
MAX_COUNTED = 64
ROOT = 0  # the state of the empty substring


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


class SuffixText:
    """A text as far as it was read, beside an automaton of earlier answers, which must not grow meanwhile."""

    def __init__(self, memory: SuffixAutomaton) -> None:
        self.num_read = 0
        self._memory, self._past = memory, NOTHING
        self._own, self._end = SuffixAutomaton(), ROOT

    def read(self, tokens: Iterable[int]) -> None:
        """Read what has been added to the text."""
        for token in tokens:
            self._end = self._own.extend(self._end, token)
            self._past = self._memory.follow(self._past, token)
            self.num_read += 1

    def drafts(self, num_tokens: int) -> tuple[list[int], float]:
        """Return up to `num_tokens` likeliest tokens, and how many of them are expected to be accepted."""
        own, past = self._own.cut(self._own.longest(self._end)), self._past
        drafts: list[int] = []
        probability, expected = 1.0, 0.0
        while len(drafts) < num_tokens:
            probs = interpolated(self._own.contexts(own), self._memory.contexts(past))
            token = max(probs, key=probs.__getitem__, default=-1)
            probability *= probs.get(token, 0.0)
            if probability < MIN_PROBABILITY:
                break
            drafts.append(token)
            expected += probability
            own, past = self._own.follow(own, token), self._memory.follow(past, token)
        return drafts, expected


def interpolated(own: Iterable[Context], past: Iterable[Context]) -> dict[int, float]:
    """Return the probabilities of the likeliest next tokens, by the suffixes of a text in itself and in earlier answers.

    From the longest suffix to the shortest, n tokens after one of which d are different get n / (n + d) of what the longer ones
    leave, and share that. Those of the text itself count `OWN_WEIGHT` times. What is left below `NEGLIGIBLE` is not shared out.
    """
    weighted = [*((each.length, OWN_WEIGHT, each) for each in own), *((each.length, 1.0, each) for each in past)]
    probs: dict[int, float] = {}
    left = 1.0
    for _, weight, context in sorted(weighted, key=lambda each: each[:2], reverse=True):
        share = weight * context.total / (weight * context.total + context.num_distinct)
        each = left * share / context.total
        for token, count in context.likeliest:
            probs[token] = probs.get(token, 0.0) + each * count
        left *= 1 - share
        if left < NEGLIGIBLE:
            break
    return probs


def automaton_of(texts: Iterable[Sequence[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.add(text)
    return automaton

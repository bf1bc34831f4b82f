"""A suffix automaton: all substrings of some texts of tokens, with the count and the latest occurrence of each.

The smallest automaton that accepts all of them (Blumer et al. 1985): a state stands for the substrings that end at the same
positions, and its suffix link leads to the longest of their suffixes that ends at more. Texts grow a token at a time, several
of them side by side; a token costs a few dictionary operations, whatever the length of the texts, and at most two states.
"""

from __future__ import annotations

from typing import NamedTuple

# A token is counted for this many suffixes, longest first. Text has a handful of them, one token repeated n times has n; there
# the shortest, used only where no longer one has a continuation, are not counted, and n tokens do not cost n * n.
MAX_COUNTED = 64

ROOT = 0  # the empty substring


class Match(NamedTuple):
    """A substring that occurs: the state it belongs to and its length in tokens."""

    state: int
    length: int


class Following(NamedTuple):
    """A token that followed a substring, the state that both lead to, and its share of the times that anything did."""

    token: int
    state: int
    share: float


class SuffixAutomaton:
    """See the module's docstring. States are numbers; the empty substring is `ROOT`."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest substring of a state
        self._count = [0]  # how often its substrings occur
        self._latest = [0]  # when one last occurred
        self._clock = 0

    def __len__(self) -> int:
        return len(self._next)

    def extend(self, end: int, token: int) -> int:
        """Append a token to the text that ends in state `end`, `ROOT` for a new text; return the state where it now ends."""
        state = end = self._append(end, token)
        self._clock += 1
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
                return Match(ROOT, 0)
            state = self._link[state]
            length = self._length[state]
        return Match(self._next[state][token], length + 1)

    def continued(self, match: Match) -> Match:
        """Return the longest suffix of a substring that is followed by any token."""
        state, length = match
        while state != ROOT and not self._next[state]:
            state = self._link[state]
            length = self._length[state]
        return Match(state, length)

    def longest(self, state: int) -> Match:
        """Return the longest substring of a state; of the state where a text ends that is the whole text."""
        return Match(state, self._length[state])

    def most_frequent(self, state: int) -> Following | None:
        """Return the token that followed a state's substrings most often, the latest among equals; None where none did."""
        following = self._next[state]
        if not following:
            return None
        token, after = max(following.items(), key=lambda item: (self._count[item[1]], self._latest[item[1]]))
        return Following(token, after, self._count[after] / sum(self._count[other] for other in following.values()))

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

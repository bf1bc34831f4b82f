"""The static tree to draft, chosen by how often each rank was accepted at each depth and by what a round costs.

Entry (d, r) of the acceptance profile `[D, R]` is how often the target, having followed the tree to depth d, continues with the
child of rank r. It is taken to be the same on every branch of a depth; the expected accepted drafts of a tree are then the sum
over its tokens of the products of entries on their paths (Cai et al. 2024, Medusa, 2401.10774). Trees are given as paths of
ranks, as in `configs.schema.drafting.StaticTree`. D depths, R ranks, N tokens of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.runtime.errors import InputError
from configs.schema.drafting import Path
from eval.decoder.records import Generation, Round
from eval.metrics.acceptance import was_cut

Profile = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ChosenTree:
    """A tree and what is expected of it."""

    paths: list[Path]
    tokens_per_round: float  # the target's own counted
    seconds_per_round: float  # by the costs it was chosen with


def measure_profile(generations: Sequence[Generation], paths: Sequence[Path]) -> Profile:
    """Return the acceptance profile of decoding with one static tree.

    A child counts as tried where its parent was accepted, the round drafted that deep and the text had not ended. The wider the
    tree, the more ranks are seen; what was never tried is 0.

    Raises:
        ValueError: a round was no tree's, or accepted what the tree does not hold.
    """
    known = set(paths)
    shape = max(map(len, known)), 1 + max(path[-1] for path in known)
    tried, accepted = np.zeros(shape), np.zeros(shape)
    for round_ in (round_ for generation in generations for round_ in generation.rounds if round_.drafted):
        if round_.ranks is None or (round_.ranks and round_.ranks not in known):
            raise ValueError(f"a round accepted the path {round_.ranks}, which the tree does not hold")
        for depth in range(_num_judged(round_)):
            way = round_.ranks[:depth]
            tried[depth] += [(*way, rank) in known for rank in range(shape[1])]
            if depth < len(round_.ranks):
                accepted[depth, round_.ranks[depth]] += 1
    return np.divide(accepted, tried, out=np.zeros(shape), where=tried > 0)


def expected_tokens(paths: Sequence[Path], profile: Profile) -> float:
    """Return the expected tokens a round of a tree, the target's own counted."""
    return 1.0 + sum(_value(path, profile) for path in paths)


def optimal_tree(profile: Profile, num_nodes: int) -> list[Path]:
    """Return the tree of at most `num_nodes` tokens whose expected accepted drafts are most.

    Sequoia's dynamic programme (Chen et al. 2024, 2402.12374), here for a profile that also goes by depth: siblings are taken
    in the order of their ranks, each with the best tree of some size below it.
    """
    forests = _Forests(profile, num_nodes)
    return forests.paths(forests.best_size(num_nodes))


def fastest_tree(profile: Profile, target_seconds: Sequence[float], draft_step_seconds: float) -> ChosenTree:
    """Return the tree with the most expected tokens a second.

    Args:
        profile: `[D, R]`.
        target_seconds: what a target forward takes over 1, 2, ... rows; the last one bounds the tree.
        draft_step_seconds: what drafting one depth takes, whatever its width.

    Raises:
        InputError: there is no time for a forward over two rows.
    """
    if len(target_seconds) < 2:
        raise InputError(f"target_seconds must tell forwards over 2 rows or more, got {len(target_seconds)} entries")
    chosen: ChosenTree | None = None
    for depth in range(1, len(profile) + 1):
        forests = _Forests(profile[:depth], len(target_seconds) - 1)
        for size in range(1, len(target_seconds)):
            tokens = 1.0 + forests.value(size)
            seconds = target_seconds[size] + depth * draft_step_seconds
            if chosen is None or tokens / seconds > chosen.tokens_per_round / chosen.seconds_per_round:
                chosen = ChosenTree(paths=forests.paths(size), tokens_per_round=tokens, seconds_per_round=seconds)
    if chosen is None:
        raise InputError("the profile has no depth")
    return chosen


class _Forests:
    """The best forests of up to N tokens below a token of each depth.

    `best[d][r, n]` is the most that n tokens are worth in the trees of the children from rank r on, in accepted drafts given
    that their parent at depth d was accepted, -inf where n do not fit; `first[d][r, n]` is how many of them child r takes.
    """

    def __init__(self, profile: Profile, num_nodes: int) -> None:
        D, R = profile.shape
        empty = np.where(np.arange(num_nodes + 1) == 0, 0.0, -np.inf)
        below = empty
        self.best: list[NDArray[np.float64]] = []
        self.first: list[NDArray[np.int64]] = []
        for depth in reversed(range(D)):
            best, first = np.tile(empty, (R + 1, 1)), np.zeros((R + 1, num_nodes + 1), dtype=np.int64)
            for rank in reversed(range(R)):
                for n in range(1, num_nodes + 1):
                    worth = np.full(n, -np.inf)  # of taking 1, 2, ... n tokens
                    fits = np.isfinite(below[:n])
                    worth[fits] = profile[depth, rank] * (1.0 + below[:n][fits])
                    worth += best[rank + 1, n - 1 :: -1]
                    first[rank, n] = 1 + int(worth.argmax())
                    best[rank, n] = worth.max()
            self.best.insert(0, best)
            self.first.insert(0, first)
            below = best[0]

    def value(self, num_nodes: int) -> float:
        """Return what the best tree of exactly so many tokens is worth, -inf where they do not fit."""
        return float(self.best[0][0, num_nodes])

    def best_size(self, most: int) -> int:
        """Return the size, 1 to `most`, of the tree that is worth most; the smaller of equals."""
        return 1 + int(self.best[0][0, 1 : most + 1].argmax())

    def paths(self, num_nodes: int) -> list[Path]:
        """Return the best tree of exactly so many tokens."""
        return sorted(self._below((), num_nodes), key=lambda path: (len(path), path))

    def _below(self, parent: Path, num_nodes: int) -> list[Path]:
        paths: list[Path] = []
        rank = 0
        while num_nodes:
            taken = int(self.first[len(parent)][rank, num_nodes])
            child = (*parent, rank)
            paths += [child, *self._below(child, taken - 1)]
            num_nodes, rank = num_nodes - taken, rank + 1
        return paths


def _value(path: Path, profile: Profile) -> float:
    """Return how often a token is accepted."""
    return float(np.prod([profile[depth, rank] for depth, rank in enumerate(path)]))


def _num_judged(round_: Round) -> int:
    """Return at how many depths of a round's tree the target chose."""
    return min(len(round_.drafted), round_.num_accepted + (not was_cut(round_)))

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


def fastest_tree(profile: Profile, target_seconds: Sequence[float], draft_step_seconds: float) -> ChosenTree:
    """Return the tree with the most expected tokens a second.

    Args:
        profile: `[D, R]`.
        target_seconds: what a target forward takes over 1, 2, ... rows, two at least; the last one bounds the tree.
        draft_step_seconds: what drafting one depth takes, whatever its width.
    """
    by_depth = [_Forests(profile[:depth], len(target_seconds) - 1) for depth in range(1, len(profile) + 1)]
    trees = [
        (forests, size, 1.0 + forests.value(size), target_seconds[size] + depth * draft_step_seconds)
        for depth, forests in enumerate(by_depth, 1)
        for size in range(1, len(target_seconds))
    ]
    forests, size, tokens, seconds = max(trees, key=lambda tree: tree[2] / tree[3])
    return ChosenTree(paths=forests.paths(size), tokens_per_round=tokens, seconds_per_round=seconds)


class _Forests:
    """The best forests of up to N tokens below a token of each depth.

    Sequoia's dynamic programme (Chen et al. 2024, 2402.12374), here for a profile that also goes by depth: siblings are taken
    in the order of their ranks, each with the best tree of some size below it.

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


def _num_judged(round_: Round) -> int:
    """Return at how many depths of a round's tree the target chose."""
    return min(len(round_.drafted), round_.num_accepted + (not was_cut(round_)))

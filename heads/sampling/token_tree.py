"""Trees of drafted tokens: their representation, and which of their tokens attend to which.

A round's target rows are numbered from 0, the pending token; draft i is row i + 1. `parents` names for each draft the row it
continues, which is also the row whose distribution verifies it: 0 to i, so parents come before their children. A chain is the
tree whose draft i continues row i. A token's position is that of its root plus its depth, wherever it stands in a cache.
B batch, N drafts, K = N + 1 rows, T new tokens, X slots of a cache that a tree takes, S cache length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from configs.schema.decoding import Candidates, DynamicTree, Path, StaticTree
from heads.device import RowInts, Rows, row_ints


@dataclass(frozen=True)
class Tree:
    """A tree that is the same in every round."""

    parents: tuple[int, ...]  # by draft; breadth first, siblings side by side in the order of their ranks
    candidates: Candidates = "without_replacement"  # how siblings are drawn, where they are, which names their rule too

    @classmethod
    def of(cls, paths: Sequence[Path], candidates: Candidates = "without_replacement") -> Tree:
        """Return the tree of the tokens with these paths (`configs.schema.decoding.StaticTree.all_paths`)."""
        ordered = sorted(paths, key=lambda path: (len(path), path))
        rows = {(): 0, **{path: number for number, path in enumerate(ordered, start=1)}}
        return cls(tuple(rows[path[:-1]] for path in ordered), candidates)

    @property
    def num_nodes(self) -> int:
        """Drafts a round."""
        return len(self.parents)

    @property
    def num_slots(self) -> int:
        """How many slots of a cache it takes at most, while drafted or verified, besides the pending token's."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of each row; the pending token's is 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        return max(self.depths)

    @cached_property
    def width(self) -> int:
        """The largest number of children of a token."""
        return max(map(self.parents.count, self.parents), default=0)

    def cut(self, depth: int) -> Tree:
        if depth >= self.depth:
            return self
        return Tree(self.parents[: sum(0 < each <= depth for each in self.depths)], self.candidates)


@dataclass(frozen=True, kw_only=True)
class DynamicTreeSpec:
    """Limits of a dynamic tree, which each row builds anew in each round from its draft's confidences (EAGLE-2)."""

    num_nodes: int  # drafts a round
    width: int  # tokens of a depth that are continued, and candidates for what follows each of them
    depth: int  # of the longest path
    max_depths: RowInts | None = None  # by row, so that each gets the tree it would get alone; None: `depth` for all

    @property
    def num_slots(self) -> int:
        return max(self.num_nodes, self.width * (self.depth - 1), self.depth)  # a draft without trees proposes a chain

    def cut(self, depth: int) -> DynamicTreeSpec:
        return replace(self, depth=min(depth, self.depth))


def tree_from(settings: StaticTree | DynamicTree, depth: int) -> Tree | DynamicTreeSpec:
    """Return the tree of these settings, no deeper than `depth`."""
    if settings.kind == "static":
        return Tree.of(settings.all_paths(), settings.candidates).cut(depth)
    return DynamicTreeSpec(num_nodes=settings.num_nodes, width=settings.width, depth=depth)


def ancestor_mask(parents_BN: Tensor) -> Tensor:
    """Return the ancestors of each row, itself included, bool `[B, K, K]`: `[b, i, j]` where j is on the path to i."""
    B, N = parents_BN.shape
    steps_BKK = torch.eye(N + 1, device=parents_BN.device).repeat(B, 1, 1)
    steps_BKK[:, 1:].scatter_(2, parents_BN.unsqueeze(-1), 1.0)
    # Squared: paths of up to one step become up to two, four, ... until the longest path of N drafts is covered.
    for _ in range(max(N, 1).bit_length()):
        steps_BKK = (steps_BKK @ steps_BKK).clamp(max=1.0)
    return steps_BKK > 0


@dataclass(frozen=True, kw_only=True)
class TreeAttention:
    """Tokens of a tree that a forward reads: the last T of X slots of a row's cache, which begin at `roots[b]`."""

    roots: RowInts  # by row, the position of a token of depth 0; earlier ones are committed and seen by the whole tree
    depths_BX: Tensor  # depth of the token in each slot, int64
    visible_BTX: Tensor  # which slots each new token sees, bool: its own and its ancestors'

    @property
    def starts(self) -> RowInts:
        """The first slot of the new tokens, by row."""
        T, X = self.visible_BTX.shape[1:]
        return self.roots + (X - T)

    @property
    def positions_BT(self) -> Tensor:
        """Where the new tokens stand in the text."""
        return self._roots_B1 + self.depths_BX[:, -self.visible_BTX.shape[1] :]

    def over(self, keys_S: Tensor) -> tuple[Tensor, Tensor]:
        """Return which slots of a cache each new token sees, bool `[B, T, S]`, and the position that each holds, `[B, S]`."""
        (B, T, X), S = self.visible_BTX.shape, len(keys_S)
        slots_BS = keys_S - self._roots_B1
        columns_BS = slots_BS.clamp(0, X - 1)
        in_tree_BTS = self.visible_BTX.gather(2, columns_BS.unsqueeze(1).expand(B, T, S)) & (slots_BS < X).unsqueeze(1)
        before_BS = slots_BS < 0
        positions_BS = torch.where(before_BS, keys_S, self._roots_B1 + self.depths_BX.gather(1, columns_BS))
        return before_BS.unsqueeze(1) | in_tree_BTS, positions_BS

    @cached_property
    def parent_slots(self) -> list[list[int]]:
        """By row, the slot of each new token's parent, counted from 1; 0: it continues the text. The host waits for it once."""
        T, X = self.visible_BTX.shape[1:]
        places_X = torch.arange(1, X + 1, device=self.visible_BTX.device)
        above_TX = places_X <= torch.arange(X - T, X, device=places_X.device).unsqueeze(1)  # parents come before their children
        parents: list[list[int]] = (self.visible_BTX & above_TX).mul(places_X).amax(2).tolist()
        return parents

    @property
    def _roots_B1(self) -> Tensor:
        return self.roots.tensor_B.unsqueeze(1)


def distinct_positions(positions_BX: Tensor) -> Tensor:
    """Return positions made different for tokens of the same position, for `CounterRNG.uniform`."""
    return positions_BX + (torch.arange(positions_BX.shape[1], device=positions_BX.device) << 32)


def tree_attention(parents_BN: Tensor, roots: Rows) -> TreeAttention:
    """Return the attention of a whole tree read in one forward, the pending token first, whose positions are `roots`."""
    visible_BKK = ancestor_mask(parents_BN.clamp(min=0))  # drafts that do not count get some parent
    roots = row_ints(roots, parents_BN.device)
    return TreeAttention(roots=roots, depths_BX=visible_BKK.sum(-1) - 1, visible_BTX=visible_BKK)

"""What one round brings one row: read from the numbers that came from the device, committed, and recorded as a `Round`.

Lists on the host, no tensors; `eval.decoder.batch` makes the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.decoder.records import DistributionComparison, Round
from eval.decoder.request import BatchRow


@dataclass(frozen=True, kw_only=True)
class RowUpdate:
    """The drafts that stay and the token after them."""

    drafted: list[int]  # those that count; of a tree the path that stays, then the first child at each depth below it
    num_accepted: int
    next_token: int  # the target's own, after the accepted ones
    finite: bool  # otherwise nothing is committed
    path: tuple[int, ...] = ()  # of a tree, the target rows of the drafts that stay
    ranks: tuple[int, ...] | None = None  # of a tree, which child of its parent each draft that stays is, from 0
    num_nodes: int | None = None  # of a tree, its drafts

    def apply(self, row: BatchRow, compared: Sequence[Sequence[float]] | None, *, by_lookup: bool = False) -> None:
        """Commit the update to its row and record the round; `compared` has a `PositionComparison` by draft, where measured."""
        committed = row.commit([*self.drafted[: self.num_accepted], self.next_token], finite=self.finite)
        overlap, distributions = None, None
        if compared is not None and self.drafted:
            # A verified draft left one token, itself or the one in its place; what follows an end of text was not verified.
            overlap, distributions = _comparison(compared[: min(len(committed), len(self.drafted))])
        row.rounds.append(
            Round(
                drafted=tuple(self.drafted),
                num_accepted=min(self.num_accepted, len(committed)),
                committed=tuple(committed),
                overlap=overlap,
                distributions=distributions,
                ranks=None if self.ranks is None else self.ranks[: len(committed)],
                num_nodes=self.num_nodes,
                by_lookup=by_lookup and bool(self.drafted),
            )
        )


def chain_update(numbers: Sequence[int], num_drafted: int) -> RowUpdate:
    """Read `[accepted, next token, finite, drafts...]`, of which the first `num_drafted` drafts count."""
    accepted, next_token, finite, *drafts = numbers
    return RowUpdate(drafted=drafts[:num_drafted], num_accepted=accepted, next_token=next_token, finite=bool(finite))


def tree_update(numbers: Sequence[int], depth: int) -> RowUpdate:
    """Read `[accepted, next token, finite, path..., drafts..., parents...]`.

    The path names target rows and has the `depth` of the tree asked for; the parent of a draft that does not count is -1.
    """
    accepted, next_token, finite, *rest = numbers
    path, nodes = rest[:accepted], rest[depth:]
    num_nodes = len(nodes) // 2
    drafts, parents = nodes[:num_nodes], nodes[num_nodes:]
    if max(parents, default=-1) < 0:  # recorded as where nothing was proposed: records do not depend on the batch
        return RowUpdate(drafted=[], num_accepted=0, next_token=next_token, finite=bool(finite))
    walked = [*path, *_first_descendants(parents, path[-1] if path else 0)]
    return RowUpdate(
        drafted=[drafts[row - 1] for row in walked],
        num_accepted=len(path),
        next_token=next_token,
        finite=bool(finite),
        path=tuple(path),
        ranks=tuple(parents[: row - 1].count(parents[row - 1]) for row in path),
        num_nodes=sum(parent >= 0 for parent in parents),
    )


def _first_descendants(parents: Sequence[int], row: int) -> list[int]:
    """Return the rows from a row's first child down to a leaf, at each depth the first child, which is the likeliest."""
    rows = []
    while row in parents:
        row = parents.index(row) + 1
        rows.append(row)
    return rows


def _comparison(verified: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], DistributionComparison]:
    """Return the overlaps of a round's verified drafts, and the rest of their comparison."""
    columns = (tuple(column) for column in zip(*verified, strict=True)) if verified else [()] * 7
    overlap, kl, uncovered, agrees, *rest = columns
    return overlap, DistributionComparison(kl, uncovered, tuple(map(bool, agrees)), *rest)

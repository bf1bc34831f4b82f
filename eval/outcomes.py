"""What a round brings one row, read from the numbers that came from the device. Lists on the host, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is committed, and what is recorded.

    Args:
        drafted: the drafts on the way that was walked; of a tree those that stay, then the likeliest branch below them.
        num_accepted: how many of them stay.
        next_token: the target's own, which comes after those.
        finite: whether the laws were numbers; nothing is committed otherwise.
        path: of a tree, the target rows of the drafts that stay.
        ranks: of a tree, which child of its parent each draft that stays is, from 0.
        num_nodes: of a tree, its drafts.
    """

    drafted: list[int]
    num_accepted: int
    next_token: int
    finite: bool
    path: tuple[int, ...] = ()
    ranks: tuple[int, ...] | None = None
    num_nodes: int | None = None


def chain_outcome(numbers: Sequence[int], num_drafted: int) -> Outcome:
    """Read `[accepted, next token, finite, drafts...]`, of which the first `num_drafted` drafts count."""
    accepted, next_token, finite, *drafts = numbers
    return Outcome(drafted=drafts[:num_drafted], num_accepted=accepted, next_token=next_token, finite=bool(finite))


def tree_outcome(numbers: Sequence[int], depth: int) -> Outcome:
    """Read `[accepted, next token, finite, path..., drafts..., parents...]`.

    Args:
        numbers: the path names target rows, `depth` of them; as many parents as drafts, -1 for those that do not count.
        depth: of the tree asked for.
    """
    accepted, next_token, finite, *rest = numbers
    path, nodes = rest[:accepted], rest[depth:]
    num_nodes = len(nodes) // 2
    drafts, parents = nodes[:num_nodes], nodes[num_nodes:]
    if max(parents, default=-1) < 0:  # as where nothing was asked for: what is recorded does not depend on the batch
        return Outcome(drafted=[], num_accepted=0, next_token=next_token, finite=bool(finite))
    walked = [*path, *_likeliest_below(parents, path[-1] if path else 0)]
    return Outcome(
        drafted=[drafts[row - 1] for row in walked],
        num_accepted=len(path),
        next_token=next_token,
        finite=bool(finite),
        path=tuple(path),
        ranks=tuple(parents[: row - 1].count(parents[row - 1]) for row in path),
        num_nodes=sum(parent >= 0 for parent in parents),
    )


def _likeliest_below(parents: Sequence[int], row: int) -> list[int]:
    """Return the rows from a row's first child down to a leaf."""
    rows = []
    while row in parents:
        row = parents.index(row) + 1
        rows.append(row)
    return rows

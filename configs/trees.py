"""The shape of a proposal that is a tree: several candidates for a position, of which the target may take any.

Imports no torch; what the settings do is in `heads.trees` and `heads.tree_drafting`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.settings import NonNegativeInt, PositiveInt, Settings

Path = tuple[int, ...]
Candidates = Literal["without_replacement", "with_replacement", "k_seq", "top_k"]


class StaticTree(Settings):
    """The same tree in every round: a drafted token is named by the ranks that lead to it, `[0, 2]` being the third child of
    the first. Give the tokens, or how many children each token of a depth has. `eval.tree_shapes` finds good ones."""

    kind: Literal["static"]
    paths: list[list[NonNegativeInt]] | None = None
    branching: list[PositiveInt] | None = None  # [3, 2]: three tokens at depth 1, two below each of them
    # At a temperature above 0, how siblings come from the draft's law, and with that the rule that judges them
    # (`eval.candidates`): drawn one after the other, each from what is left; drawn independently, with recursive rejection or
    # SpecTr's k-SEQ; or the likeliest, held against draws of the target's own. None: without_replacement, but top_k where
    # `verification` is match or typical acceptance takes the likeliest.
    candidates: Candidates | None = None

    @model_validator(mode="after")
    def _is_a_tree(self) -> Self:
        if (self.paths is None) == (self.branching is None):
            raise ValueError("give exactly one of paths and branching")
        if self.paths is not None:
            check_paths(self.paths)
        elif not self.branching:
            raise ValueError("branching must name at least one depth, such as [2, 1]")
        return self

    def all_paths(self) -> list[Path]:
        """Return every token's path, parents before children and siblings in their order."""
        if self.paths is not None:
            return sorted((tuple(path) for path in self.paths), key=lambda path: (len(path), path))
        counts = self.branching or []
        levels = (itertools.product(*map(range, counts[:depth])) for depth in range(1, len(counts) + 1))
        return [path for level in levels for path in level]

    @property
    def depth(self) -> int:
        """The longest way down."""
        return max(map(len, self.paths or [])) if self.branching is None else len(self.branching)


class DynamicTree(Settings):
    """A tree grown anew in each round, where the draft is sure (EAGLE-2). Its depth is `num_speculative_tokens`."""

    kind: Literal["dynamic"]
    num_nodes: PositiveInt = 16  # drafted tokens that the target judges in a round
    width: PositiveInt = 4  # tokens of a depth that are continued, and candidates for what follows each of them


TreeConfig = Annotated[StaticTree | DynamicTree | None, Field(discriminator="kind")]


def check_paths(paths: Sequence[Sequence[int]]) -> None:
    """Refuse a list of paths that is no tree.

    Raises:
        ValueError: it is empty, names a token twice, or leaves out a parent or an earlier sibling of one.
    """
    known = {tuple(path) for path in paths}
    if not known or () in known:
        raise ValueError("paths must name at least one token, and none by an empty path, which would be the pending token")
    if len(known) < len(paths):
        raise ValueError("paths must name each token once")
    for path in sorted(known):
        if path[:-1] and path[:-1] not in known:
            raise ValueError(f"paths is no tree: {list(path)} is there, its parent {list(path[:-1])} is not")
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known:
            before = [*path[:-1], path[-1] - 1]
            raise ValueError(f"paths must take siblings in their order: {list(path)} is there, {before} is not")

"""The shape of a round's drafts: trees of candidates, and the rule that stops a chain early. Imports no torch.

The confidence of a distribution is its largest probability; it is taken of the distribution that drafts are drawn from, at
temperature 1 where decoding is greedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Annotated, Literal

from pydantic import Field

from configs.schema.base import NonNegativeInt, PositiveInt, Settings, Share

Path = tuple[int, ...]
Candidates = Literal["without_replacement", "with_replacement", "k_seq"]


class StaticTree(Settings):
    """The same tree in every round: a drafted token is named by the ranks that lead to it, `[0, 2]` being the third child of
    the first. Give the tokens, or how many children each token of a depth has."""

    kind: Literal["static"]
    paths: list[list[NonNegativeInt]] | None = None  # every drafted token by the ranks that lead to it
    branching: list[PositiveInt] | None = None  # [3, 2]: three tokens at depth 1, two below each of them
    # At a temperature above 0, how siblings are drawn from the draft's distribution, and the rule that judges them: one after
    # the other, or independently, with recursive rejection or SpecTr's k-SEQ. Not read where the likeliest are taken
    # (`verification: match`, typical acceptance)
    candidates: Candidates = "without_replacement"

    def objections(self) -> Iterator[str]:
        if (self.paths is None) == (self.branching is None):
            yield "give exactly one of paths and branching"
        if self.paths is not None:
            yield from unless_a_tree(self.paths)
        elif not self.branching:
            yield "branching must name at least one depth, such as [2, 1]"

    def all_paths(self) -> list[Path]:
        """Return every token's path, parents before children and siblings in their order."""
        if self.paths is not None:
            return sorted((tuple(path) for path in self.paths), key=lambda path: (len(path), path))
        counts = self.branching or []
        levels = (product(*map(range, counts[:depth])) for depth in range(1, len(counts) + 1))
        return [path for level in levels for path in level]

    @property
    def depth(self) -> int:
        """Tokens on the longest path."""
        return max(map(len, self.paths or [])) if self.branching is None else len(self.branching)


class DynamicTree(Settings):
    """A tree grown anew in each round, where the draft is sure (EAGLE-2). Its depth is `num_speculative_tokens`."""

    kind: Literal["dynamic"]
    num_nodes: PositiveInt = 16  # drafted tokens that the target judges in a round
    width: PositiveInt = 4  # tokens of a depth that are continued, and candidates for what follows each of them


TreeConfig = Annotated[StaticTree | DynamicTree | None, Field(discriminator="kind")]


def unless_a_tree(paths: Sequence[Sequence[int]]) -> Iterator[str]:
    """Object to a list of paths that is empty, names a token twice, or leaves out a parent or an earlier sibling of one."""
    known = {tuple(path) for path in paths}
    if not known or () in known:
        yield "paths must name at least one token, and none by an empty path, which would be the pending token"
    if len(known) < len(paths):
        yield "paths must name each token once"
    for path in sorted(known - {()}):
        if path[:-1] and path[:-1] not in known:
            yield f"paths is no tree: {list(path)} is there, its parent {list(path[:-1])} is not"
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known:
            before = [*path[:-1], path[-1] - 1]
            yield f"paths must take siblings in their order: {list(path)} is there, {before} is not"


# What a rule takes for a draft's confidence: the largest probability of its distribution, or a head's own estimate of its
# acceptance (dspark).
ConfidenceBy = Literal["distribution", "estimate"]


class ConfidenceStopping(Settings):
    """The token drawn from a distribution less confident than this is the round's last."""

    rule: Literal["confidence"]
    threshold: Share = 0.4  # the draft's highest probability, or its estimate
    by: ConfidenceBy = "distribution"  # estimate: the draft's own estimate of its acceptance, of a head that makes one (dspark)


StoppingConfig = ConfidenceStopping | None

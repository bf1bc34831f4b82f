"""The shape of a round's drafts: trees of candidates, and rules that stop a chain early. Imports no torch.

The confidence of a distribution is its largest probability; it is taken of the distribution that drafts are drawn from, at
temperature 1 where decoding is greedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from configs.schema.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Settings, Share

Path = tuple[int, ...]
WIDE = (4, 3, 2)  # children by depth, of trees that acceptance by rank is measured with
Candidates = Literal["without_replacement", "with_replacement", "k_seq", "top_k"]


class StaticTree(Settings):
    """The same tree in every round: a drafted token is named by the ranks that lead to it, `[0, 2]` being the third child of
    the first. Give the tokens, or how many children each token of a depth has."""

    kind: Literal["static"]
    paths: list[list[NonNegativeInt]] | None = None  # every drafted token by the ranks that lead to it
    branching: list[PositiveInt] | None = None  # [3, 2]: three tokens at depth 1, two below each of them
    # At a temperature above 0, how siblings come from the draft's distribution, and the rule that judges them: drawn one after
    # the other; drawn independently, with recursive rejection or SpecTr's k-SEQ; or the likeliest, held against draws of the
    # target's own. None: without_replacement, but top_k where `verification` or typical acceptance takes the likeliest
    candidates: Candidates | None = None

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
    def drawn_candidates(self) -> Candidates:
        """How siblings are chosen where drafts are drawn."""
        return self.candidates or "without_replacement"

    @property
    def depth(self) -> int:
        """Tokens on the longest path."""
        return max(map(len, self.paths or [])) if self.branching is None else len(self.branching)


class DynamicTree(Settings):
    """A tree grown anew in each round, where the draft is sure (EAGLE-2). Its depth is `num_speculative_tokens`."""

    kind: Literal["dynamic"]
    candidates: ClassVar[None] = None  # none to choose
    num_nodes: PositiveInt = 16  # drafted tokens that the target judges in a round
    width: PositiveInt = 4  # tokens of a depth that are continued, and candidates for what follows each of them

    @property
    def drawn_candidates(self) -> Candidates:
        """Always the likeliest: which drafts a dynamic tree keeps depends on their probability."""
        return "top_k"


class FastestTree(Settings):
    """The static tree with the most tokens a second, which `eval/run.py` finds before it measures."""

    kind: Literal["fastest"]
    num_prompts: PositiveInt = 8  # that decide: of the suite's prompts, some of those that suite.num_prompts leaves out
    num_nodes: PositiveInt = 16  # drafted tokens of the tree at most
    # Of the tree that acceptance is measured with, and of which the chosen one is a part. None: [4, 3, 2], then 1 a depth
    branching: Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    candidates: Candidates | None = None  # as for a static tree

    def measured(self, depth: int) -> StaticTree:
        """Return the tree that acceptance is measured with, where drafts may be so many tokens deep."""
        branching = self.branching or [*WIDE, *[1] * depth][:depth]
        return StaticTree(kind="static", branching=branching, candidates=self.candidates)

    @property
    def drawn_candidates(self) -> Candidates:
        return self.candidates or "without_replacement"

    @property
    def depth(self) -> int:
        """Tokens on its longest path, as far as they are set."""
        return len(self.branching or ())


TreeConfig = Annotated[StaticTree | DynamicTree | FastestTree | None, Field(discriminator="kind")]


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


class EntropyStopping(Settings):
    """The token drawn from a distribution of more entropy than this is the round's last."""

    rule: Literal["entropy"]
    threshold: NonNegativeFloat = 2.0  # nats


class CalibrationPoint(Settings):
    """How often drafts from distributions of this confidence are accepted, where the drafts before them were."""

    confidence: Share  # the draft's probability of the token it drew
    acceptance: Share  # share of such tokens that is accepted


class CostStopping(Settings):
    """Go on while the tokens to be expected are worth the time. `eval.cost.draft_length.fit_stopping` fills this in."""

    rule: Literal["cost"]
    draft_step_milliseconds: NonNegativeFloat  # of one more draft; 0 for a head that drafts all in one forward
    target_step_milliseconds: list[PositiveFloat]  # of 1, 2, ... rows: at least num_speculative_tokens + 1 entries
    round_milliseconds: NonNegativeFloat = 0.0  # of what a round does besides
    # Straight lines between the points, level beyond the outer ones. By default the acceptance is the confidence.
    calibration: list[CalibrationPoint] = Field(
        default_factory=lambda: [CalibrationPoint(confidence=end, acceptance=end) for end in (0.0, 1.0)]
    )
    acceptance: Annotated[float, Field(ge=0, lt=1)] = 0.6  # expected of a draft whose distribution is not known yet
    by: ConfidenceBy = "distribution"  # what is calibrated; estimate: the draft's own estimate of its acceptance (dspark)
    tokens_per_second: PositiveFloat | None = None  # what time is worth; None: the best fixed length's, at that acceptance

    def objections(self) -> Iterator[str]:
        if not self.calibration:
            yield "calibration needs at least one point"
        for one, other in pairwise(self.calibration):
            if other.confidence <= one.confidence or other.acceptance < one.acceptance:
                yield (
                    "calibration must rise in confidence and not fall in acceptance, got "
                    f"{other.confidence:g}: {other.acceptance:g} after {one.confidence:g}: {one.acceptance:g}"
                )


StoppingConfig = Annotated[ConfidenceStopping | EntropyStopping | CostStopping | None, Field(discriminator="rule")]

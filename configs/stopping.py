"""When a draft stops before `num_speculative_tokens`: the settings of the rules in `heads.stopping`. Imports no torch.

The confidence of a law is its largest probability. Laws are looked at as they are drawn from, at temperature 1 where decoding
is greedy.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.settings import NonNegativeFloat, PositiveFloat, Settings, Share


class ConfidenceStopping(Settings):
    """The token drawn from a law less confident than this is the round's last."""

    rule: Literal["confidence"]
    threshold: Share = 0.4


class EntropyStopping(Settings):
    """The token drawn from a law of more entropy than this is the round's last."""

    rule: Literal["entropy"]
    threshold: NonNegativeFloat = 2.0  # nats


class CalibrationPoint(Settings):
    """How often drafts from laws of this confidence are accepted, where the drafts before them were."""

    confidence: Share
    acceptance: Share


class CostStopping(Settings):
    """Go on while the tokens to be expected are worth the time. `eval.draft_lengths.fit_stopping` fills this in."""

    rule: Literal["cost"]
    draft_step_milliseconds: NonNegativeFloat  # of one more draft; 0 for a head that drafts all in one forward
    target_step_milliseconds: list[PositiveFloat]  # of 1, 2, ... rows: at least num_speculative_tokens + 1 entries
    round_milliseconds: NonNegativeFloat = 0.0  # of what a round does besides
    # Straight lines between the points, level beyond the outer ones. By default a confidence is taken at its word.
    calibration: list[CalibrationPoint] = Field(
        default_factory=lambda: [CalibrationPoint(confidence=end, acceptance=end) for end in (0.0, 1.0)]
    )
    acceptance: Annotated[float, Field(ge=0, lt=1)] = 0.6  # expected of a draft whose law is not known yet
    tokens_per_second: PositiveFloat | None = None  # what time is worth; None: the best fixed length's, at that acceptance

    @model_validator(mode="after")
    def _calibration_rises(self) -> Self:
        if not self.calibration:
            raise ValueError("calibration needs at least one point")
        for one, other in pairwise(self.calibration):
            if other.confidence <= one.confidence or other.acceptance < one.acceptance:
                raise ValueError(
                    "calibration must rise in confidence and not fall in acceptance, got "
                    f"{other.confidence:g}: {other.acceptance:g} after {one.confidence:g}: {one.acceptance:g}"
                )
        return self


StoppingConfig = Annotated[ConfidenceStopping | EntropyStopping | CostStopping | None, Field(discriminator="rule")]

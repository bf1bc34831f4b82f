"""The sections of a report that only some runs ask for: quality, energy and rendered answers.

As those of `eval.report.sections`. Torch-free.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from eval.report.sections import Bounds, ClosedSection, Count, Number

# Shown by the page as it is, so nothing but a picture or sound gets in. (A picture in SVG runs no scripts as an image.)
DATA_URL = r"^data:(image/(png|jpeg|webp|svg\+xml)|audio/(wav|mpeg|ogg));base64,[A-Za-z0-9+/=]+$"
DataUrl = Annotated[str, Field(pattern=DATA_URL)]


class PerplexitySection(ClosedSection):
    """The target's perplexity on its own answers; `ratio` is speculative over plain, 1 where the answers are as likely."""

    autoregressive: Number
    autoregressive_ci: Bounds
    speculative: Number
    speculative_ci: Bounds
    ratio: Number
    ratio_ci: Bounds


class ScoreSection(ClosedSection):
    """One scorer's mean over all answers of both modes; `difference` is speculative - plain."""

    autoregressive: float
    autoregressive_ci: Bounds
    speculative: float
    speculative_ci: Bounds
    difference: float
    difference_ci: Bounds
    num_changed: Count  # answers whose score differs between the modes


class FeatureDistanceSection(ClosedSection):
    """Fréchet distances of the answers of both modes from the references, and from each other."""

    autoregressive: Number
    speculative: Number
    between: Number


class QualitySection(ClosedSection):
    """The quality of the answers, on the requests answered in both modes without failing."""

    num_answers: Count
    num_identical: Count  # token for token
    num_failed: Count  # requests that failed in one of the modes, and have no score
    num_cut: Count  # answers that reached the limit of their length in one of the modes
    perplexity: PerplexitySection | None = Field(
        description="exp of the mean negative log-probability that the target gives the tokens of all answers, at temperature "
        "1 and without top-k or top-p. The change is speculative over plain."
    )
    scores: dict[str, ScoreSection] = Field(
        description="The mean of a scorer over all answers. The change is speculative minus plain, prompt by prompt. Where no "
        "score changed, its interval is that of a share of which none was seen."
    )
    feature_distance: FeatureDistanceSection | None = Field(
        None,
        description="The Fréchet distance of two sets of answers in the space of the run's features: of either mode's answers "
        "from the suite's references, and between the modes. It has no interval, and compares sets of the same size only.",
    )


class EnergySection(ClosedSection):
    """Energy of the decode phases; without `source` there are no numbers, and `reason` says why."""

    source: str | None
    reason: str | None
    decode_joules_autoregressive: Number
    decode_joules_speculative: Number
    joules_per_token_autoregressive: Number
    joules_per_token_autoregressive_ci: Bounds
    joules_per_token_speculative: Number
    joules_per_token_speculative_ci: Bounds
    joules_per_token_ratio: Number  # speculative over plain; below 1 saves energy
    joules_per_token_ratio_ci: Bounds


class RenderedAnswer(ClosedSection):
    """Both ways' answers to one prompt as pictures or sound."""

    prompt_id: str
    prompt: str
    autoregressive: DataUrl
    speculative: DataUrl

"""The sections of a report that are there only where the config asks for them: what the answers are worth, what they burn.

Both set plain and speculative decoding side by side. `eval.quality` and `eval.energy` fill them in.
"""

from __future__ import annotations

from eval.report_base import Bounds, Count, Measured, Number


class PerplexitySection(Measured):
    """How likely the target finds its own answers; `ratio` is speculative over plain, 1 where the answers are as likely."""

    autoregressive: Number
    autoregressive_ci: Bounds
    speculative: Number
    speculative_ci: Bounds
    ratio: Number
    ratio_ci: Bounds


class ScoreSection(Measured):
    """One scorer's mean over all answers of both modes; `difference` is speculative - plain."""

    autoregressive: float
    autoregressive_ci: Bounds
    speculative: float
    speculative_ci: Bounds
    difference: float
    difference_ci: Bounds
    num_changed: Count  # answers scored otherwise in the two modes


class QualitySection(Measured):
    """What the answers are worth, on the requests answered in both modes without failing."""

    num_answers: Count
    num_identical: Count  # token for token
    num_failed: Count  # requests that failed in one of the modes, and have no score
    num_cut: Count  # answers that reached the limit of their length in one of the modes
    perplexity: PerplexitySection | None
    scores: dict[str, ScoreSection]


class EnergySection(Measured):
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

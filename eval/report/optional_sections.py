"""The sections of a report that are there only where the config asks for them: quality, energy, what the cost model expects.

The first two set plain and speculative decoding side by side. `eval.metrics.quality`, `eval.metrics.energy` and
`eval.cost.predict` fill them in.
"""

from __future__ import annotations

from eval.report.base import Bounds, Count, Measured, Number


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


class PredictedSpeedup(Measured):
    """What the cost model expects of one setting."""

    num_speculative_tokens: Count
    batch_size: Count
    context_tokens: Count
    decode_speedup: float


class TimedRoundSection(Measured):
    """A round of the timing sweep; see `eval.cost.timing_sweep.TimedRound`."""

    num_speculative_tokens: Count
    batch_size: Count
    context_tokens: Count
    draft_seconds: float
    draft_seconds_after_full: float
    verify_seconds: float
    other_seconds: float
    draft_bytes: float
    draft_flops: float
    verify_bytes: float
    verify_flops: float


class AnswerLengthSection(Measured):
    """Answers of one length; see `eval.cost.expected_rounds.AnswerLength`."""

    num_tokens: Count
    room_behind: Count
    num_answers: Count


class PredictedSection(Measured):
    """Decode speedup by the fitted cost model, and what the model was made of besides the acceptance."""

    context_tokens: Count  # of this run, and of the settings that the page shows
    settings: list[PredictedSpeedup]
    decode_speedup: Number  # of this run's own setting, to be held against the measured one
    best_num_speculative_tokens: Count | None  # at this run's batch size; None: plain decoding is faster
    # The largest at which any number of drafts still pays: 0 where none does, None where every one does that was looked at.
    break_even_batch_size: Count | None
    sweep: list[TimedRoundSection] = []
    answers: list[AnswerLengthSection] = []

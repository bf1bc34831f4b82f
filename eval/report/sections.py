"""The measured sections of a report, as pydantic models: acceptance, speed, and what only some runs ask for.

The text below a field says what its number means; the page shows it (`eval.report.schema.definitions`).
A field with a default is missing from reports of an earlier version, or of runs that did not ask for it. Torch-free.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Number = float | None
Count = Annotated[int, Field(ge=0)]
Bounds = Annotated[list[float], Field(min_length=2, max_length=2)] | None
CountPair = Annotated[list[Count], Field(min_length=2, max_length=2)]
NumberPair = Annotated[list[float], Field(min_length=2, max_length=2)]


class ClosedSection(BaseModel):
    """A section of numbers: strict types, no unknown fields, every interval as `[low, high]`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _check_intervals(self) -> Self:
        for name, value in self:
            if name.endswith("_ci") and value is not None and value[0] > value[1]:
                raise ValueError(f"{name} must be [low, high], got {value}")
        return self

    def interval_of(self, name: str) -> tuple[float | None, list[float] | None]:
        """Return a number and its interval; both `None` where the section has no such number."""
        return getattr(self, name, None), getattr(self, f"{name}_ci", None)


# --- acceptance ---------------------------------------------------------------------------------------------------


class StoppingClass(ClosedSection):
    """Drafts from distributions of one class of confidence, all drafts before them in their round being accepted."""

    confidence_from: float
    confidence_to: float
    num_drafts: Count
    confidence: Number
    accepted: Number  # the share of them that was accepted too


class ReliabilityClass(StoppingClass):
    target_probability: Number


class AcceptanceSection(ClosedSection):
    """How many drafted tokens the target accepted. Lists go by draft position or by length, from 0."""

    tokens_per_target_step: Number
    """Committed tokens divided by the target's decode forwards, pooled over all prompts. It includes the target's own token of
    each round, and neither the prefill's token nor anything behind the end of a text. Plain decoding is exactly 1. Written τ;
    also called acceptance length or block efficiency."""
    tokens_per_target_step_ci: Bounds
    tokens_per_target_step_macro: Number
    """The mean over prompts of each prompt's own tokens per target step."""
    tokens_per_target_step_macro_ci: Bounds
    num_tokens: Count
    num_rounds: Count
    accepted_per_round: Number
    """The mean number of drafted tokens accepted in a round, without the target's own token."""
    draft_token_yield: Number
    """Accepted tokens divided by drafted tokens. It falls as rounds draft more, so it is no acceptance rate."""
    overlap_alpha: Number
    """The acceptance rate α: the sum over the vocabulary of min(p, q), from the target's and the draft's probabilities at the
    temperature in use, averaged over drafted positions up to the first rejected one. In greedy decoding it is the share of
    positions at which both find the same token likeliest."""
    overlap_alpha_ci: Bounds
    overlap_alpha_by_position: list[Number]
    """The same acceptance rate, averaged at each draft position by itself."""
    top1_agreement: Number = None
    """The share of compared positions at which draft and target find the same token likeliest."""
    kl_divergence: Number = None
    """The Kullback-Leibler divergence KL(p ‖ q) of the target's distribution p from the draft's q, in nats, averaged over
    compared positions; over the draft's vocabulary, with p normalised there."""
    uncovered_mass: Number = None
    """The target's probability of tokens outside the draft's vocabulary, averaged over compared positions."""
    calibration_error: Number = None
    """The difference between the draft's and the target's mean probability of drafted tokens, by class of confidence, averaged
    over all drafts. 0 for a draft equal to the target."""
    reliability: list[ReliabilityClass] = []
    """Drafted tokens in ten classes by the draft's own probability for them: the mean of it, the target's mean probability for
    the same tokens, and the share that was accepted."""
    stopping_reliability: list[StoppingClass] = []
    """Drafts in ten classes by the largest probability of the draft's distribution, which stopping rules read, and the share
    accepted where all before them were."""
    stopping_calibration_error: Number = None
    """How far that confidence lies from the share accepted, by class, averaged over all drafts."""
    estimate_reliability: list[StoppingClass] = []
    """The same by the draft's own estimate of its acceptance, of drafts that make one."""
    estimate_calibration_error: Number = None
    """How far that estimate lies from the share accepted, by class, averaged over all drafts."""
    estimate_auroc: Number = None
    """The chance that of an accepted and a refused draft the accepted one has the higher estimate."""
    position_conditional: list[Number]
    """The share accepted at this position of the rounds in which every draft before it was accepted. A draft behind an accepted
    end of text is not counted."""
    position_survival: list[Number]
    """The share of the rounds that drafted this far which also accepted this far."""
    accepted_histogram: list[Count]
    """How many rounds accepted 0, 1, 2, ... drafted tokens."""
    drafted_histogram: list[Count]
    """How many rounds drafted 0, 1, 2, ... tokens."""
    accepted_per_round_ci: Bounds = None
    draft_token_yield_ci: Bounds = None
    top1_agreement_ci: Bounds = None
    top1_agreement_by_position: list[Number] = []
    kl_divergence_ci: Bounds = None
    kl_divergence_by_position: list[Number] = []
    uncovered_mass_by_position: list[Number] = []


class RoundsSection(ClosedSection):
    num_prompts: Count
    num_rounds: Count
    tokens_per_target_step: Number
    tokens_per_target_step_ci: Bounds


class LengthClass(RoundsSection):
    from_tokens: Count
    to_tokens: Count  # not among them


class WholeAcceptanceSection(AcceptanceSection):
    detectable_change_percent: Number = None
    """The smallest change of τ against a fixed number, in percent, that so many prompts would show in four of five runs. A
    comparison prompt by prompt with another draft detects smaller ones."""
    by_context_tokens: list[LengthClass] = []
    """Tokens per target step by how many tokens of prompt and answer came before the round. A draft trained on short texts
    falls off on longer ones."""
    by_thinking: dict[Literal["inside", "outside"], RoundsSection] = {}
    """Tokens per target step of the rounds that began inside the thinking of an answer, between `<think>` and `</think>`, and
    of all others. Empty where no answer thinks."""
    by_answer_tokens: list[LengthClass] = []  # by those of the answer alone, in reports of an earlier version
    per_prompt: dict[str, CountPair]  # prompt id -> [committed tokens, rounds]


# --- speed --------------------------------------------------------------------------------------------------------


class PhasesSection(ClosedSection):
    draft_seconds: float
    verify_seconds: float
    sample_seconds: float
    overhead_seconds: float
    shares: dict[Literal["draft", "verify", "sample", "overhead"], Number]


class SpeedupSection(ClosedSection):
    decode_speedup: Number
    """Plain decoding's seconds per token divided by speculative decoding's, prefill excluded: totals over the same prompts,
    decoded in turns in one run by the same loop."""
    decode_speedup_ci: Bounds
    decode_speedup_median: Number = None  # of the batches' own, in reports of an earlier version
    decode_speedup_median_ci: Bounds = None
    end_to_end_speedup: Number
    """As the decode speedup, with the time and the token of the prefill included on both sides."""
    end_to_end_speedup_ci: Bounds


class SpeedSection(SpeedupSection):
    """Seconds and tokens are sums over all repeats."""

    decode_seconds_autoregressive: float
    decode_seconds_speculative: float
    prefill_seconds_autoregressive: float
    prefill_seconds_speculative: float
    decode_tokens_autoregressive: Count
    decode_tokens_speculative: Count
    milliseconds_per_token_autoregressive: Number = None  # prefill excluded; None in reports of an earlier version
    milliseconds_per_token_speculative: Number = None
    repeats: Count
    """How often each batch was decoded in each mode; modes take turns within a repeat."""
    num_batches: Count
    interleaving: list[str]  # the modes, in the order in which they took turns
    measure_seconds: float  # spent on measuring while decoding speculatively; in no speed
    phases: PhasesSection
    """Decode seconds by what they were spent on: the draft's forwards, the target's forwards, acceptance and sampling, and
    everything else. Time spent on measuring is in none of them."""
    phases_autoregressive: PhasesSection


class BatchSection(ClosedSection):
    """Prompts that were decoded together: [decode seconds, decode tokens] plainly and with the draft, over all repeats."""

    prompt_ids: list[str]
    autoregressive: NumberPair
    speculative: NumberPair


class PredictedSpeedup(ClosedSection):
    num_speculative_tokens: Count
    batch_size: Count
    context_tokens: Count
    decode_speedup: float


class TimedRound(ClosedSection):
    """What a round of the timing sweep takes: seconds on this machine, and the work, which is the same on any machine."""

    num_speculative_tokens: Count  # 0 is a plain round
    batch_size: Count
    context_tokens: Count  # before the round's own
    draft_seconds: float  # after a round that did not keep all drafts
    draft_seconds_after_full: float  # after one that did
    verify_seconds: float  # the target's forward
    other_seconds: float  # verification and everything else
    draft_bytes: float
    draft_flops: float
    verify_bytes: float
    verify_flops: float


class AnswerLength(ClosedSection):
    num_tokens: Count  # committed by rounds; the prefill's token is not among them
    room_behind: Count  # tokens that the limit would have left room for: 0 for an answer that it ended
    num_answers: Count


class PredictedSection(ClosedSection):
    """Decode speedup by the cost model, and what the model was fitted to, with the acceptance."""

    context_tokens: Count  # of this run, and of the settings that the page shows
    settings: list[PredictedSpeedup]
    decode_speedup: Number  # of this run's own setting, to compare with the measured one
    best_num_speculative_tokens: Count | None  # at this run's batch size; None: plain decoding is faster
    # The largest timed batch at which any number of drafts still pays: 0 where none does, None where every timed one does.
    break_even_batch_size: Count | None
    sweep: list[TimedRound] = []
    answers: list[AnswerLength] = []


class GenerateSection(ClosedSection):
    """transformers' own `generate` and plain decoding: the same prompts, in turns, one at a time, whole answers."""

    num_prompts: Count
    milliseconds_per_token_generate: float
    milliseconds_per_token_autoregressive: float


class WholeSpeedSection(SpeedSection):
    generate: GenerateSection | None = None
    """What a token takes in transformers' `generate` and in plain decoding here, prefill included."""
    predicted: PredictedSection | None = None
    """Decode speedup at other batch sizes and numbers of drafts, by a cost model fitted to a timing sweep on this machine and
    to the measured acceptance by position. Positions beyond those measured take the last one's acceptance; batches beyond the
    sweep's largest follow the fit."""
    per_batch: list[BatchSection] | None = None


# --- what only some runs ask for -----------------------------------------------------------------------------------


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
    autoregressive: Number
    speculative: Number
    between: Number


class QualitySection(ClosedSection):
    num_answers: Count
    num_identical: Count  # token for token
    num_failed: Count  # requests that failed in one of the modes, and have no score
    num_cut: Count  # answers that reached the limit of their length in one of the modes
    perplexity: PerplexitySection | None
    """exp of the mean negative log-probability that the target gives the tokens of all answers, at temperature 1 and without
    top-k or top-p. The change is speculative over plain."""
    scores: dict[str, ScoreSection]
    """The mean of a scorer over all answers. The change is speculative minus plain, prompt by prompt. Where no score changed,
    its interval is that of a share of which none was seen."""
    feature_distance: FeatureDistanceSection | None = None
    """The Fréchet distance of two sets of answers in the space of the run's features: of either mode's answers from the suite's
    references, and between the modes. It has no interval, and compares sets of the same size only."""

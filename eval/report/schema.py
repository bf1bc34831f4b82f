"""`report.json` as one typed model: what `eval.evaluation` makes, and what the gate, the pages and the model card read.

`load_report` and `write_report` are the only ways from and to disk. Measured sections take no field that is not named;
descriptions of what was measured (target, draft, decode, losslessness) may carry more. `None`: not available in this run. The
text below a field says what its number means; the page shows it (`definitions`). Torch-free.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from configs.runtime.errors import InputError, first_finding
from configs.runtime.files import check_readable, read_json, write_json

SCHEMA_VERSION = 1  # rises when a field changes its meaning or goes away
CHECK_FILE = "check.json"  # of `draftsmith check`

Number = float | None
Count = Annotated[int, Field(ge=0)]
Bounds = Annotated[list[float], Field(min_length=2, max_length=2)] | None
CountPair = Annotated[list[Count], Field(min_length=2, max_length=2)]
NumberPair = Annotated[list[float], Field(min_length=2, max_length=2)]
Phases = dict[Literal["draft_seconds", "verify_seconds", "sample_seconds", "overhead_seconds"], float]
LosslessVerdict = Literal["lossless", "lossless_up_to_ties", "not_lossless", "lossy_by_design", "inconclusive"]


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


class OpenSection(BaseModel):
    """A section that describes what was measured; it may hold more than the fields named."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


# --- what was measured --------------------------------------------------------------------------------------------


class TargetSection(OpenSection):
    """The target: `heads.frozen.identity.TargetIdentity` and how it was loaded."""

    name: str
    weights_sha256: str
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None


class DraftSection(OpenSection):
    kind: str
    path: str
    sha256: str
    target_sha256: str | None = None  # of the target it was made for
    num_parameters: int | None = None
    measured_sha256: str | None = None  # in a published report: the hash before paths were removed from the metadata


class DecodeSection(OpenSection):
    """The decoding settings, as in `configs.schema.decoding.DecodeConfig`."""

    num_speculative_tokens: Count
    temperature: float
    batch_size: Count
    dtype: str | None = None
    verification: str | None = None
    lossy: dict[str, Any] | None = None
    stopping: dict[str, Any] | None = None
    tree: dict[str, Any] | None = None


class FailedRequest(ClosedSection):
    prompt_id: str
    turn: Count = 0
    mode: str
    stop_reason: str


class PromptsSection(ClosedSection):
    """The prompts, and how many were answered. `num_prompts` counts prompts decoded in every mode without failing."""

    suite: str  # its name
    source: str
    format: str  # of the suite's rows
    sha256: str
    ids: list[str]
    num_asked: Count
    num_turns: Count  # of all prompts
    num_prompts: Count
    num_trained_on: Count | None  # of all prompts, by the draft; None: the artifact does not say
    categories: dict[str, Count]
    failed: list[FailedRequest]
    """Prompts whose decoding failed in any mode. What was decoded of them is counted, their batches are timed in no mode, and
    no gate passes the report."""


class DivergenceSection(ClosedSection):
    """A place where the speculative answer left the plain one; see `eval.teacher_forcing.Divergence`."""

    prompt_id: str
    turn: Count = 0
    position: Count
    plain_token: Count
    speculative_token: Count
    logit_gap: float
    tie_tolerance: float


class LosslessSection(OpenSection):
    """Whether speculative decoding changed the answers; see `eval.lossless`."""

    verdict: LosslessVerdict
    """Whether speculation changed the output. The target in a wider dtype reads every greedy answer once more, those of plain
    decoding as well: no token's logit may lie further below the largest than plain decoding's do, up to rounding, nor may the
    tokens of all answers together. Up to ties: some answers also differ from plain decoding's, at near ties. Sampled answers: a
    statistical test against the target's distribution must not fail, and must be able to show a difference that matters. Lossy
    by design: the rule changes the distribution."""
    checked_prompts: Count
    checked_tokens: Count | None = None  # of greedy answers
    largest_gap: Number = None  # of all checked tokens, in logits
    largest_gap_in_roundings: Number = None
    """The same in rounding errors: the root mean square by which the logits of likely tokens, less that of the likeliest,
    differ at a position between the target's own dtype and the wider one."""
    tolerance: Number = None  # the most that rounding explains, in rounding errors
    off_share: Number = None
    """The share of tokens that are not the likeliest one by the reading in the wider dtype."""
    plain_largest_gap_in_roundings: Number = None
    plain_off_share: Number = None
    divergences: list[DivergenceSection]  # the first of each differing answer
    checks: dict[str, dict[str, Any]] = {}
    failed_checks: list[str] = []
    inconclusive_checks: list[str] = []


# --- acceptance ---------------------------------------------------------------------------------------------------


class AcceptanceSection(ClosedSection):
    """How many drafted tokens the target accepted. Lists go by draft position or by length, from 0."""

    tokens_per_target_step: Number
    """Committed tokens divided by the target's decode forwards, pooled over all prompts. It includes the target's own token of
    each round, and neither the prefill's token nor anything behind the end of a text. Plain decoding is exactly 1. Written τ;
    also called acceptance length or block efficiency."""
    tokens_per_target_step_ci: Bounds
    """Brackets hold a 95 % interval: Student's t over whole prompts (for seconds, whole batches), of the logarithm of a ratio
    of sums, with the jackknife's standard error. Below three prompts (or batches) there is none."""
    tokens_per_target_step_macro: Number
    """The mean over prompts of each prompt's own tokens per target step."""
    tokens_per_target_step_macro_ci: Bounds
    num_tokens: Count
    num_rounds: Count
    accepted_per_round: Number
    """The mean number of drafted tokens accepted in a round, without the target's own token."""
    accepted_per_round_ci: Bounds
    draft_token_yield: Number
    """Accepted tokens divided by drafted tokens. It falls as rounds draft more, so it is no acceptance rate."""
    draft_token_yield_ci: Bounds
    overlap_alpha: Number
    """The acceptance rate α: the chance that a draft is kept, averaged over drafted positions up to the first rejected one.
    Where drafts are the draft's likeliest tokens it is the target's probability of that token, in greedy decoding 1 or 0. Where
    drafts are drawn it is the sum over the vocabulary of min(p, q), from the target's and the draft's probabilities. Under
    typical acceptance it is the share of plausible drafts."""
    overlap_alpha_ci: Bounds
    overlap_alpha_by_position: list[Number]
    """The same acceptance rate, averaged at each draft position by itself."""
    uncovered_mass: Number
    """The target's probability of tokens outside the draft's vocabulary, averaged over compared positions."""
    uncovered_mass_ci: Bounds
    position_conditional: list[Number]
    """The share accepted at this position of the rounds in which every draft before it was accepted. A draft behind an accepted
    end of text is not counted."""
    position_survival: list[Number]
    """The share of the rounds that drafted this far which also accepted this far."""
    accepted_histogram: list[Count]
    """How many rounds accepted 0, 1, 2, ... drafted tokens."""
    drafted_histogram: list[Count]
    """How many rounds drafted 0, 1, 2, ... tokens."""


class WholeAcceptanceSection(AcceptanceSection):
    detectable_change_percent: Number
    """The smallest change of τ against a fixed number, in percent, that so many prompts would show in four of five runs. A
    comparison prompt by prompt with another draft detects smaller ones."""
    per_prompt: dict[str, CountPair]  # prompt id -> [committed tokens, rounds]


# --- speed --------------------------------------------------------------------------------------------------------


class SpeedupSection(ClosedSection):
    decode_speedup: Number
    """Plain decoding's seconds per token divided by speculative decoding's, prefill excluded: totals over the same prompts,
    decoded in turns in one run by the same loop."""
    decode_speedup_ci: Bounds
    end_to_end_speedup: Number
    """As the decode speedup, with the time and the token of the prefill included on both sides."""
    end_to_end_speedup_ci: Bounds


class BatchSection(ClosedSection):
    """Prompts that were decoded together: [decode seconds, decode tokens] plainly and with the draft, over all repeats."""

    prompt_ids: list[str]
    autoregressive: NumberPair
    speculative: NumberPair


class PredictedSpeedup(ClosedSection):
    num_speculative_tokens: Count
    batch_size: Count
    decode_speedup: float


class TimedRound(ClosedSection):
    """The mean seconds of a round of the timing sweep."""

    num_speculative_tokens: Count  # 0 is a plain round
    batch_size: Count
    seconds: float


class PredictedSection(ClosedSection):
    settings: list[PredictedSpeedup]
    sweep: list[TimedRound]


class SpeedSection(SpeedupSection):
    """Seconds and tokens are sums over all repeats."""

    decode_seconds_autoregressive: float
    decode_seconds_speculative: float
    decode_tokens_autoregressive: Count
    decode_tokens_speculative: Count
    milliseconds_per_token_autoregressive: Number  # prefill excluded
    milliseconds_per_token_speculative: Number
    repeats: Count
    """How often each batch was decoded in each mode; modes take turns within a repeat."""
    phases: Phases
    """Decode seconds by what they were spent on: the draft's forwards, the target's forwards, acceptance and sampling, and
    everything else."""
    phase_shares: Phases  # of the speculative phases' sum
    predicted: PredictedSection | None = None
    """Decode speedup by batch size and number of drafts: tokens a round by the measured acceptance at each position, seconds a
    round by a timing sweep, interpolated between the batches that were timed."""
    per_batch: list[BatchSection]


# --- what only some runs ask for ----------------------------------------------------------------------------------


class RatioSection(ClosedSection):
    """A number of both ways of decoding, and the speculative one's over the plain one's."""

    autoregressive: Number
    autoregressive_ci: Bounds
    speculative: Number
    speculative_ci: Bounds
    ratio: Number
    ratio_ci: Bounds


class ExactMatchSection(ClosedSection):
    autoregressive: float
    autoregressive_ci: Bounds
    speculative: float
    speculative_ci: Bounds
    difference: float  # speculative - plain
    difference_ci: Bounds
    num_changed: Count  # answers whose score differs between the modes


class QualitySection(ClosedSection):
    num_answers: Count
    num_identical: Count  # token for token
    num_failed: Count  # requests that failed in one of the modes, and have no score
    num_cut: Count  # answers that reached the limit of their length in one of the modes
    perplexity: RatioSection | None
    """exp of the mean negative log-probability that the target gives the tokens of all answers, at temperature 1 and without
    top-k or top-p. The change is speculative over plain."""
    exact_match: ExactMatchSection | None
    """The share of answers whose last number is the reference's. The change is speculative minus plain, prompt by prompt. Where
    no answer changed, its interval is that of a share of which none was seen."""


class EnergySection(ClosedSection):
    reason: str | None  # why there are no numbers
    joules_per_token: RatioSection | None
    """Joules per token of whole answers, by the counters of the GPU's board (NVML) or of all processor packages (RAPL). Idle
    power and other work on the machine are included. The ratio is speculative over plain."""


# --- the report ---------------------------------------------------------------------------------------------------


class CategorySection(ClosedSection):
    """The prompts of one category; `speed` is `None` where their batches also held others, or nothing was timed."""

    num_prompts: Count
    acceptance: AcceptanceSection
    speed: SpeedupSection | None


class OtherWaySection(SpeedupSection):
    """Another way of decoding the same prompts in the same run, and a ratio of each number to the draft's, or the inverse."""

    num_speculative_tokens: Count  # that it drafts a round at most
    tokens_per_target_step: Number
    tokens_per_target_step_ci: Bounds
    overlap_alpha: Number = None
    overlap_alpha_ci: Bounds = None
    tokens_per_target_step_ratio: Number
    tokens_per_target_step_ratio_ci: Bounds
    decode_speed_ratio: Number
    decode_speed_ratio_ci: Bounds
    learns_from_prompts: bool = False
    """Whether each answer helps to draft those to later prompts, of the same process. Prompts are not independent then, which
    intervals take them for: those of this way and of ratios with it may be too narrow."""


class SuiteSection(ClosedSection):
    """What was measured on one suite; a report is that of its first."""

    prompts: PromptsSection
    acceptance: WholeAcceptanceSection
    speed: SpeedSection | None
    by_category: dict[str, CategorySection]
    """The same numbers over the prompts of one category alone."""
    baselines: dict[str, OtherWaySection]
    """Other ways to decode, measured in the same run on the same prompts. Prompt lookup copies drafts from the text so far.
    Suffix lookup counts what followed in it, in `decode.lookup_answer_tokens` of earlier answers, and in the answers to prompts
    that the same process decoded before. A ratio is this draft's number over theirs, on the same prompts."""
    other_verification: OtherWaySection | None = None
    """The same draft at a temperature above 0 with its drafts chosen the other way. Where `decode.verification` is one_hot (the
    draft's likeliest tokens, as vLLM takes them by default) they are drawn from its distribution here, and judged token by
    token or by the tree's rule; else they are the likeliest here. A ratio is the draft's number over this one."""
    with_lookup: OtherWaySection | None = None
    """The same draft with suffix lookup, which takes a round where it expects `decode.lookup_expects` accepted drafts or more.
    A ratio is its number over the draft's alone."""


class Report(SuiteSection):
    schema_version: Literal[1]
    warnings: list[str]
    command: list[str] | None
    target: TargetSection
    draft: DraftSection
    decode: DecodeSection
    hardware: dict[str, Any]
    versions: dict[str, Any]
    git: dict[str, Any] | None
    suites: dict[str, SuiteSection] = {}
    """Further suites, measured in the same run; every other section is of the first suite, but for the losslessness, which was
    checked on all."""
    lossless: LosslessSection
    quality: QualitySection | None = None  # None: not asked for
    energy: EnergySection | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values: the fields that were given, and no defaults of those that were not."""
        return {"schema_version": self.schema_version} | self.model_dump(exclude_unset=True)


def parse_report(value: Any, where: str) -> Report:
    """Return a report from JSON values; `where` names it in error messages."""
    if not isinstance(value, dict) or value.get("schema_version") != SCHEMA_VERSION:
        raise InputError(
            f"{where} is no report of schema_version {SCHEMA_VERSION}, which this draftsmith reads: run eval/run.py"
        )
    try:
        return Report.model_validate(value)
    except ValidationError as error:
        raise InputError(f"{where}: {first_finding(error, 'report')}") from error


def load_report(path: Path, what: str = "report") -> Report:
    """Read a report file; `what` names its role in the error message."""
    return parse_report(read_json(path, what), f"{what} {path}")


def report_file(path: str | Path) -> Path:
    """Return the report's file; the folder that `eval/run.py` wrote stands for the `report.json` in it."""
    path = Path(path)
    if not path.is_dir():
        return path
    check_readable(path)
    return path / "report.json"


class ServedSection(OpenSection):
    """What an engine said of the draft: the part of `draftsmith check`'s `check.json` that the gate reads."""

    engine: str
    checked: bool
    passed: bool | None
    reason: str | None
    version: str | None
    draft_sha256: str | None
    num_speculative_tokens: Count | None
    prompts_sha256: str | None
    per_prompt: dict[str, CountPair]
    sampling: dict[str, Any] | None = None  # above temperature 0, of a second pass
    sampled_per_prompt: dict[str, CountPair] = {}  # of that


def load_check(path: Path) -> ServedSection:
    """Read what `draftsmith check` wrote: its `check.json`, or the folder that has it."""
    path = path / CHECK_FILE if path.is_dir() else path
    try:
        return ServedSection.model_validate(read_json(path, "engine check"))
    except ValidationError as error:
        raise InputError(f"engine check {path}: {first_finding(error, 'check')}; run draftsmith check again") from error


def write_report(path: Path, report: Report) -> None:
    """Write a report file."""
    write_json(path, report.to_dict())


def definitions(section: type[BaseModel] = Report, path: str = "") -> dict[str, str]:
    """Return what each described number of a report means, by dotted path, in the order of the fields."""
    found: dict[str, str] = {}
    for name, field in section.model_fields.items():
        own = f"{path}{name}"
        if field.description is not None:
            found[own] = " ".join(field.description.split())
        options = get_args(field.annotation)
        for kind in options if type(None) in options else (field.annotation,):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= definitions(kind, f"{own}.")
    return found

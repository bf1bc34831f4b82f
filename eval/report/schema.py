"""The form of `report.json`, checked when a report is written and again when one is read.

Measured sections are closed: a field that is not named here is an error. Descriptions of what was measured (target,
draft, decode, hardware) have a few required fields and may carry more. `None` says that a number is not available in this
run. `eval.report.definitions` says what each number means. `SCHEMA_VERSION` rises when a field changes its meaning or goes
away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from configs.runtime.errors import InputError
from configs.runtime.files import read_json
from eval.report.base import Bounds, Count, Described, Measured, Number
from eval.report.optional_sections import EnergySection, PredictedSection, QualitySection

SCHEMA_VERSION = 1

Verdict = Literal["lossless", "lossless_up_to_ties", "not_lossless", "lossy_by_design", "inconclusive"]


class TargetSection(Described):
    """The target: `heads.target.identity.TargetIdentity` and how it was loaded."""

    name: str
    weights_sha256: str


class DraftSection(Described):
    """The artifact that was decoded with."""

    kind: str
    path: str
    sha256: str


class DecodeSection(Described):
    """The decoding settings, as in `configs.schema.decoding.DecodeConfig`."""

    num_speculative_tokens: Count
    temperature: float
    batch_size: Count


class StatisticsSection(Measured):
    """How the intervals were made."""

    bootstrap_samples: Count
    seed: Count
    level: float


class FailedRequest(Measured):
    """A prompt whose decoding broke off for a reason of ours."""

    prompt_id: str
    turn: Count = 0
    mode: str
    stop_reason: str


class PromptsSection(Measured):
    """What was asked, and how much of it was answered. `num_prompts` counts prompts decoded in every mode without failing."""

    source: str
    format: str | None = None  # of the suite's rows
    sha256: str
    ids: list[str]
    num_asked: Count
    num_turns: Count | None = None  # of all prompts; None in reports from before later turns were asked
    num_prompts: Count
    categories: dict[str, Count]
    failed: list[FailedRequest]


class ReliabilitySection(Measured):
    """Drafts of one class of confidence: what the draft gave its tokens, what the target gives them, and how many it kept."""

    confidence_from: float
    confidence_to: float
    num_drafts: Count
    confidence: Number
    target_probability: Number
    accepted: Number


class StoppingClass(Measured):
    """Drafts from distributions of one class of confidence, all before them in their rounds being kept, and how many were
    kept too."""

    confidence_from: float
    confidence_to: float
    num_drafts: Count
    confidence: Number
    accepted: Number


class AcceptanceSection(Measured):
    """How many drafted tokens the target took. Lists go by draft position or by length, from 0."""

    tokens_per_target_step: Number
    tokens_per_target_step_ci: Bounds
    tokens_per_target_step_macro: Number
    tokens_per_target_step_macro_ci: Bounds
    num_tokens: Count
    num_rounds: Count
    accepted_per_round: Number
    draft_token_yield: Number
    position_conditional: list[Number]
    position_survival: list[Number]
    accepted_histogram: list[Count]
    drafted_histogram: list[Count]
    overlap_alpha: Number
    overlap_alpha_ci: Bounds
    overlap_alpha_by_position: list[Number]
    # What follows is missing from reports of an earlier draftsmith.
    accepted_per_round_ci: Bounds = None
    draft_token_yield_ci: Bounds = None
    top1_agreement: Number = None
    top1_agreement_ci: Bounds = None
    top1_agreement_by_position: list[Number] = []
    kl_divergence: Number = None  # nats
    kl_divergence_ci: Bounds = None
    kl_divergence_by_position: list[Number] = []
    uncovered_mass: Number = None
    uncovered_mass_by_position: list[Number] = []
    calibration_error: Number = None
    reliability: list[ReliabilitySection] = []
    stopping_calibration_error: Number = None
    stopping_reliability: list[StoppingClass] = []


class WholeAcceptanceSection(AcceptanceSection):
    """Acceptance over all prompts, with the counts that a later report is compared by."""

    detectable_change_percent: Number = None  # of tau, against a fixed number; see eval.stats.power
    per_prompt: dict[str, Annotated[list[Count], Field(min_length=2, max_length=2)]]  # [committed tokens, rounds]


class PhasesSection(Measured):
    """Where the decode seconds went."""

    draft_seconds: float
    verify_seconds: float
    sample_seconds: float
    overhead_seconds: float
    shares: dict[Literal["draft", "verify", "sample", "overhead"], Number]


class SpeedupSection(Measured):
    """One way of decoding against plain decoding."""

    decode_speedup: Number
    decode_speedup_ci: Bounds
    decode_speedup_median: Number
    decode_speedup_median_ci: Bounds
    end_to_end_speedup: Number
    end_to_end_speedup_ci: Bounds


class SpeedSection(SpeedupSection):
    """Speculative decoding against plain decoding; seconds and tokens are sums over all repeats."""

    decode_seconds_autoregressive: float
    decode_seconds_speculative: float
    prefill_seconds_autoregressive: float
    prefill_seconds_speculative: float
    decode_tokens_autoregressive: Count
    decode_tokens_speculative: Count
    repeats: Count
    num_batches: Count
    interleaving: list[str]  # the modes, in the order in which they took turns
    measure_seconds: float  # spent on measuring while decoding speculatively; in no speed
    phases: PhasesSection
    phases_autoregressive: PhasesSection


class BatchSection(Measured):
    """Prompts that were decoded together: [decode seconds, decode tokens] plainly and with the draft, over all repeats."""

    prompt_ids: list[str]
    autoregressive: Annotated[list[float], Field(min_length=2, max_length=2)]
    speculative: Annotated[list[float], Field(min_length=2, max_length=2)]


class WholeSpeedSection(SpeedSection):
    """Speed over all prompts, with the seconds that a later report is compared by."""

    predicted: PredictedSection | None = None  # None: no cost model was fitted
    per_batch: list[BatchSection] | None = None  # None: a report of before it was kept


class DivergenceSection(Measured):
    """A place where the speculative answer left the plain one; see `eval.decoder.records.Divergence`."""

    prompt_id: str
    turn: Count = 0
    position: Count
    plain_token: Count
    speculative_token: Count
    logit_gap: float
    tie_tolerance: float


class LosslessSection(Described):
    """Whether speculative decoding changed the answers."""

    verdict: Verdict
    checked_prompts: Count
    divergences: list[DivergenceSection]


class CategorySection(Measured):
    """The prompts of one category; `speed` is `None` where their batches also held others, or nothing was timed."""

    num_prompts: Count
    acceptance: AcceptanceSection
    speed: SpeedSection | None


class BaselineSection(SpeedupSection):
    """Another way of decoding the same prompts in the same run; the ratios are this draft's numbers over this way's."""

    tokens_per_target_step_ratio: Number = None
    tokens_per_target_step_ratio_ci: Bounds = None
    decode_speed_ratio: Number = None
    decode_speed_ratio_ci: Bounds = None
    tokens_per_target_step: Number
    tokens_per_target_step_ci: Bounds
    accepted_per_round: Number
    draft_token_yield: Number
    decode_seconds: float
    decode_tokens: Count


class Piece(Measured):
    """Some text of an answer and who wrote it."""

    kind: Literal["prefill", "accepted", "rejected", "target"]
    text: str


class Sample(Measured):
    """One answer, for reading."""

    prompt_id: str
    category: str
    prompt: str
    tokens_per_target_step: float
    pieces: list[Piece]


class Report(Measured):
    """The whole of `report.json`."""

    schema_version: Literal[1]
    simulated: bool  # acceptance was drawn, not measured; no gate passes such a report
    warnings: list[str]
    command: list[str] | None
    target: TargetSection
    draft: DraftSection
    decode: DecodeSection
    hardware: dict[str, Any]
    versions: dict[str, Any]
    git: dict[str, Any] | None
    statistics: StatisticsSection
    prompts: PromptsSection
    acceptance: WholeAcceptanceSection
    speed: WholeSpeedSection | None
    lossless: LosslessSection
    quality: QualitySection | None = None  # None: not asked for
    energy: EnergySection | None = None  # None: not asked for
    by_category: dict[str, CategorySection]
    baselines: dict[str, BaselineSection]
    samples: dict[Literal["worst", "best"], list[Sample]]


def check_report(value: Any, where: str) -> dict[str, Any]:
    """Return `value` if it is a report of this schema version.

    Args:
        value: what JSON gave.
        where: names the report in the complaint.

    Raises:
        InputError: it is not; the sentence names the first field that is wrong.
    """
    if not isinstance(value, dict) or "schema_version" not in value:
        raise InputError(f"{where} is no report: it has no schema_version")
    if value["schema_version"] != SCHEMA_VERSION:
        found = value["schema_version"]
        raise InputError(f"{where} has schema_version {found!r}, this draftsmith reads {SCHEMA_VERSION}; run eval/run.py again")
    try:
        Report.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"{where}: {'.'.join(map(str, first['loc'])) or 'report'}: {first['msg']}") from error
    for path, number in numbers_of(value):
        if number is not None and not math.isfinite(number):
            raise InputError(f"{where}: {path} is {number}; a report holds finite numbers, or null where there is none")
    return value


def read_report(path: Path, what: str = "report") -> dict[str, Any]:
    """Read and check a report file; `what` names its role in the complaint.

    Raises:
        InputError: the file is missing, not JSON, or no report of this schema version.
    """
    return check_report(read_json(path, what), f"{what} {path}")


def numbers_of(value: Any, path: str = "") -> Iterator[tuple[str, float | None]]:
    """Yield (dotted path, number) of every number and every null in a report; list items go by index."""
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    else:
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield path, value
        return
    for key, child in children:
        yield from numbers_of(child, f"{path}.{key}" if path else str(key))

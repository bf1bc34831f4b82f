"""`report.json` as one typed model: what `eval.report.build` makes, and what the gate, the pages and the model card read.

`load_report` and `write_report` are the only ways from and to disk. Measured sections (`eval.report.sections`) take no field
that is not named; descriptions of what was measured (target, draft, decode, losslessness) may carry more. `None` says that a
number is not available in this run. `SCHEMA_VERSION` rises when a field changes its meaning or goes away. Torch-free.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.runtime.errors import InputError
from configs.runtime.files import check_readable, read_json, write_json
from eval.report.sections import (
    AcceptanceSection,
    Bounds,
    ClosedSection,
    Count,
    Number,
    QualitySection,
    SpeedSection,
    SpeedupSection,
    WholeAcceptanceSection,
    WholeSpeedSection,
)

SCHEMA_VERSION = 1
# Shown by the page as it is, so nothing but a picture or sound gets in. (A picture in SVG runs no scripts as an image.)
DATA_URL = r"^data:(image/(png|jpeg|webp|svg\+xml)|audio/(wav|mpeg|ogg));base64,[A-Za-z0-9+/=]+$"
DataUrl = Annotated[str, Field(pattern=DATA_URL)]

LosslessVerdict = Literal["lossless", "lossless_up_to_ties", "not_lossless", "lossy_by_design", "inconclusive"]


class OpenSection(BaseModel):
    """A section that describes what was measured; it may hold more than the fields named."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


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
    lookups: list[str] = []  # that drafted beside it
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


class StatisticsSection(ClosedSection):
    bootstrap_samples: Count
    seed: Count
    level: float


class FailedRequest(ClosedSection):
    prompt_id: str
    turn: Count = 0
    mode: str
    stop_reason: str


class PromptsSection(ClosedSection):
    """The prompts, and how many were answered. `num_prompts` counts prompts decoded in every mode without failing."""

    suite: str | None = None  # its name; None in reports of an earlier version
    source: str
    format: str | None = None  # of the suite's rows
    sha256: str
    ids: list[str]
    num_asked: Count
    num_turns: Count | None = None  # of all prompts; None in reports of an earlier version
    num_prompts: Count
    num_trained_on: Count | None = None  # of all prompts, by the draft; None: the artifact does not say
    categories: dict[str, Count]
    failed: list[FailedRequest]
    """Prompts whose decoding failed in any mode. What was decoded of them is counted, their batches are timed in no mode, and
    no gate passes the report."""


class DivergenceSection(ClosedSection):
    """A place where the speculative answer left the plain one; see `eval.lossless.teacher_forcing.Divergence`."""

    prompt_id: str
    turn: Count = 0
    position: Count
    plain_token: Count
    speculative_token: Count
    logit_gap: float
    tie_tolerance: float


class LosslessSection(OpenSection):
    """Whether speculative decoding changed the answers; see `eval.lossless.verdict`."""

    verdict: LosslessVerdict
    """Whether speculation changed the output. A copy of the target in a wider dtype reads every greedy answer once more: no
    token's logit may lie further below the largest than rounding explains. Up to ties: some answers also differ from plain
    decoding's, at near ties. Sampled answers: two statistical tests against the target's distribution must not fail, and must
    be able to show a difference that matters. Lossy by design: the rule changes the distribution."""
    checked_prompts: Count
    checked_tokens: Count | None = None  # of greedy answers; None in reports of an earlier version
    differing_answers: Count | None = None  # greedy ones that are not plain decoding's
    tolerance: Number = None
    """How far a token's logit may lie below the largest, at the median token: `tie_noise` times the difference between the
    target's logits in the decoding dtype and in the wider one."""
    largest_gap: Number = None  # of all checked tokens, in logits
    divergences: list[DivergenceSection]  # the first of each differing answer
    checks: dict[str, dict[str, Any]] = {}
    failed_checks: list[str] = []
    inconclusive_checks: list[str] = []


class CategorySection(ClosedSection):
    """The prompts of one category; `speed` is `None` where their batches also held others, or nothing was timed."""

    num_prompts: Count
    acceptance: AcceptanceSection
    speed: SpeedSection | None


class OtherWaySection(SpeedupSection):
    """Another way of decoding the same prompts in the same run, and its ratios to the draft's numbers."""

    tokens_per_target_step: Number
    tokens_per_target_step_ci: Bounds
    accepted_per_round: Number
    draft_token_yield: Number
    tokens_per_target_step_ratio: Number = None
    tokens_per_target_step_ratio_ci: Bounds = None
    decode_speed_ratio: Number = None
    decode_speed_ratio_ci: Bounds = None


class BaselineSection(OtherWaySection):
    """A way of decoding without this draft; the ratios are this draft's numbers over this way's."""

    decode_seconds: float
    decode_tokens: Count
    num_speculative_tokens: Count | None = None  # that it drafts a round at most; None in reports of an earlier version


class WithLookupSection(OtherWaySection):
    """The draft with a lookup; the ratios are its numbers over the draft's alone."""

    lookup: str
    lookup_rounds_share: Number  # of all rounds, those in which the lookup drafted
    lookup_tokens_share: Number  # of all accepted drafts, those of the lookup


class SuiteSection(ClosedSection):
    """What was measured on one suite; a report is that of its first."""

    prompts: PromptsSection
    acceptance: WholeAcceptanceSection
    speed: WholeSpeedSection | None
    by_category: dict[str, CategorySection]
    """The same numbers over the prompts of one category alone."""
    baselines: dict[str, BaselineSection]
    """Other ways to decode, measured in the same run on the same prompts. Prompt lookup copies drafts from the text so far.
    Suffix lookup counts what followed in it, in `decode.lookup_answer_tokens` of earlier answers, and in the answers to prompts
    that the same process decoded before. Self-speculation drafts with the target's own first blocks. A ratio is this draft's
    number over theirs, on the same prompts."""
    with_lookup: WithLookupSection | None = None
    """The same draft with suffix lookup, which counts what the baseline of that name does, takes a round where it expects
    `decode.lookup_expects` accepted drafts or more, and in the others mixes its counts into the draft's distributions. A ratio
    is its number over the draft's alone."""


class AnswerSpan(ClosedSection):
    kind: Literal["prefill", "accepted", "rejected", "target"]
    text: str


class AnswerSample(ClosedSection):
    prompt_id: str
    category: str
    prompt: str
    tokens_per_target_step: float
    pieces: list[AnswerSpan]


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
    prompt_id: str
    prompt: str
    autoregressive: DataUrl
    speculative: DataUrl


class Report(SuiteSection):
    schema_version: Literal[1]
    simulated: Literal[False]  # an earlier version could also draw the acceptance
    warnings: list[str]
    command: list[str] | None
    target: TargetSection
    draft: DraftSection
    decode: DecodeSection
    hardware: dict[str, Any]
    versions: dict[str, Any]
    git: dict[str, Any] | None
    statistics: StatisticsSection
    """Brackets hold an interval: a percentile bootstrap that draws whole prompts (for seconds, whole batches) with replacement
    and divides sums, with both sides of a ratio from the same draw, and tails widened for few prompts."""
    suites: dict[str, SuiteSection] = {}
    """Further suites, measured in the same run; every other section is of the first suite, but for the losslessness, which was
    checked on all."""
    lossless: LosslessSection
    quality: QualitySection | None = None  # None: not asked for
    energy: EnergySection | None = None
    """Joules of decoding per token, by the counters of the GPU's board (NVML) or of all processor packages (RAPL). Idle power
    and other work on the machine are included, prefill is not. The ratio is speculative over plain."""
    samples: dict[Literal["worst", "best"], list[AnswerSample]]
    rendered: list[RenderedAnswer] = []  # the first prompts' answers, where the run names a function that renders them

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values: the fields that were given, and no defaults of those that were not."""
        return {"schema_version": self.schema_version} | self.model_dump(exclude_unset=True)


def parse_report(value: Any, where: str) -> Report:
    """Return a report from JSON values; `where` names it in error messages."""
    if not isinstance(value, dict) or "schema_version" not in value:
        raise InputError(f"{where} is no report: it has no schema_version")
    if (found := value["schema_version"]) != SCHEMA_VERSION:
        raise InputError(f"{where} has schema_version {found!r}, this draftsmith reads {SCHEMA_VERSION}; run eval/run.py again")
    try:
        return Report.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"{where}: {'.'.join(map(str, first['loc'])) or 'report'}: {first['msg']}") from error


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

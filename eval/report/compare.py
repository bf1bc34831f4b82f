"""Several reports side by side: what each measured, how it changed from the first, and what else differs between them.

A token count means something for one target, one set of prompts and one way of decoding; seconds also for one machine, one
version of torch and transformers, and one dtype. `differences` lists what two reports differ in: the gate refuses a baseline
report over it (`eval.release.checks`), and `compare` refuses reports of different targets or prompts unless they are allowed by
name. Seeds are not compared. `eval.report.page` renders the page. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any, Literal

from configs.runtime.errors import InputError
from configs.runtime.terminal import one_line
from eval.report.paired import PairedReports, compare_reports
from eval.report.schema import DecodeSection, DraftSection, PromptsSection, Report, TargetSection
from eval.report.text import VERDICTS, interval, number, short, significant, times
from eval.stats.paired import Change

Aspect = Literal["target", "suite", "num_speculative_tokens", "decode", "machine"]
IDENTITY = {"weights_sha256": "target weights", "tokenizer_sha256": "tokenizer", "chat_template_sha256": "chat template"}
MACHINE = ("cpu", "cores", "device", "threads", "processes")
SOFTWARE = ("torch", "transformers")  # whose versions decide the seconds too
SAME_DISTRIBUTION = ("seed", "warmup_prompts", "num_speculative_tokens")  # the last is an aspect of its own
NOT_RECORDED = "not recorded"
MAX_REPORTS = 8  # lines that can be told apart in one picture
FIXED: tuple[Aspect, ...] = ("target", "suite")  # what reports that are compared must agree in, unless allowed by name


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that two reports were made with otherwise."""

    aspect: Aspect
    what: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.what} ({self.ours} here, {self.theirs} there)"


@dataclass(frozen=True, kw_only=True)
class ComparedReport:
    """One of several reports. The changes are from the first; `None` for the first, and where they would mean nothing."""

    letter: str
    path: str
    report: Report
    tau: Change | None = None  # of tokens per target step; needs the same target and the same answered prompts
    speed: Change | None = None  # of the decode speedup; needs the same machine, software, dtype and batches as well
    differences: tuple[Difference, ...] = ()
    tau_by_suite: Mapping[str, Change] = field(default_factory=dict)  # on further suites of the same prompts


def compare(reports: Sequence[tuple[str, Report]], may_differ_in: Sequence[str] = ()) -> list[ComparedReport]:
    """Compare each report with the first.

    Args:
        reports: (path, report) each, from 2 to `MAX_REPORTS`.
        may_differ_in: `target` and `suite` may not differ unless they are named here.

    Raises:
        InputError: too few or too many reports, or some of different targets or prompts.
    """
    if not 2 <= len(reports) <= MAX_REPORTS:
        raise InputError(f"from 2 to {MAX_REPORTS} reports can be compared, got {len(reports)}")
    (first_path, first), *others = reports
    entries = [ComparedReport(letter=ascii_uppercase[0], path=first_path, report=first)]
    for letter, (path, report) in zip(ascii_uppercase[1:], others, strict=False):
        entries.append(_entry(letter, path, report, first, may_differ_in))
    return entries


def _entry(letter: str, path: str, report: Report, first: Report, may_differ_in: Sequence[str]) -> ComparedReport:
    found = tuple(differences(report, first))
    refused = [each for each in found if each.aspect in FIXED and each.aspect not in may_differ_in]
    if refused:
        allow = ", ".join(dict.fromkeys(each.aspect for each in refused))
        raise InputError(
            f"{path} is not about the same as the first report: {'; '.join(map(str, refused))}. "
            f"To see them side by side all the same: --set may_differ_in=[{allow}]"
        )
    aspects: set[str] = {each.aspect for each in found}
    untimely = "machine" in aspects or any(each.what == "decode.dtype" for each in found)
    paired = _paired(report, first, aspects)
    return ComparedReport(
        letter=letter,
        path=path,
        report=report,
        tau=None if paired is None else paired.tokens_per_target_step,
        speed=None if paired is None or untimely or paired.batches_left_out else paired.decode_speedup,
        differences=found,
        tau_by_suite={} if paired is None else _by_suite(report, first),
    )


def _by_suite(report: Report, first: Report) -> dict[str, Change]:
    """Return how tau changed on the further suites of which both answered the same prompts."""
    same = [
        name
        for name, section in report.suites.items()
        if name in first.suites
        and section.prompts.sha256 == first.suites[name].prompts.sha256
        and section.acceptance.per_prompt.keys() == first.suites[name].acceptance.per_prompt.keys()
    ]
    changes = {name: compare_reports(report, first, suite=name).tokens_per_target_step for name in same}
    return {name: change for name, change in changes.items() if change is not None}


def _paired(report: Report, first: Report, aspects: set[str]) -> PairedReports | None:
    """Compare prompt by prompt, where both answered all of the same prompts for the same target."""
    ours, theirs = (each.acceptance.per_prompt.keys() for each in (report, first))
    return compare_reports(report, first) if ours == theirs and not aspects & set(FIXED) else None


def in_words(change: Change | None) -> str:
    """Return `×1.04 [1.02, 1.06] better`; or `no difference shown`, with the change that the prompts could have shown."""
    if change is None:
        return ""
    if change.ratio_ci is None:
        return f"×{change.ratio:.2f}"
    words: str = change.outcome
    if change.outcome == "inconclusive":
        least = "" if not change.detectable_percent else f" ({significant(change.detectable_percent, 2)} % would show)"
        words = f"no difference shown{least}"
    return f"×{change.ratio:.2f} {interval(change.ratio_ci)} {words}"


def as_table(entries: Sequence[ComparedReport]) -> str:
    """Return the comparison for a terminal: a line a report, then what each was made with otherwise than the first."""
    header = ("", "report", "drafts", "prompts", "τ", "τ against A", "decode speedup", "speed against A", "α", "output")
    rows = [header, *(_row(entry) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [
        one_line(f"{entry.letter} on {name}: τ {number(change.ours)}, {in_words(change)}")
        for entry in entries
        for name, change in entry.tau_by_suite.items()
    ]
    notes += [
        one_line(f"{entry.letter} differs from A in {difference}") for entry in entries for difference in entry.differences
    ]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _row(entry: ComparedReport) -> tuple[str, ...]:
    report = entry.report
    acceptance = report.acceptance
    speedup, speedup_ci = (None, None) if report.speed is None else report.speed.interval_of("decode_speedup")
    return (
        entry.letter,
        one_line(entry.path),
        str(report.decode.num_speculative_tokens),
        f"{report.prompts.num_prompts} of {report.prompts.num_asked}",
        _ranged(number(acceptance.tokens_per_target_step), acceptance.tokens_per_target_step_ci),
        in_words(entry.tau),
        _ranged(times(speedup), speedup_ci),
        in_words(entry.speed),
        number(acceptance.overlap_alpha),
        VERDICTS[report.lossless.verdict] + (", SIMULATED" if report.simulated else ""),
    )


def _ranged(value: str, bounds: Sequence[float] | None) -> str:
    return f"{value} {interval(bounds)}".rstrip()


# --- what two reports differ in ------------------------------------------------------------------------------------


def differences(report: Report, other: Report) -> list[Difference]:
    """Return what `report` (ours, here) and `other` (theirs, there) differ in, the most important first."""
    return [
        *_target(report.target, other.target),
        *prompt_differences(report.prompts, other.prompts),
        *_settings(report.decode, other.decode),
        *_lookups(report.draft, other.draft),
        *_machine(report, other),
    ]


def _target(ours: TargetSection, theirs: TargetSection) -> list[Difference]:
    def name(target: TargetSection, key: str) -> str:
        digest = getattr(target, key)
        return f"{target.name}, {short(digest)}" if digest else NOT_RECORDED

    return [
        Difference(aspect="target", what=what, ours=name(ours, key), theirs=name(theirs, key))
        for key, what in IDENTITY.items()
        if getattr(ours, key) != getattr(theirs, key)
    ]


def prompt_differences(ours: PromptsSection, theirs: PromptsSection) -> list[Difference]:
    """Compare the prompts of a suite: the same file by its hash, and the same ones of it, in any order."""
    if ours.sha256 != theirs.sha256:
        names = [f"{prompts.source}, {short(prompts.sha256)}" for prompts in (ours, theirs)]
        return [Difference(aspect="suite", what="prompts", ours=names[0], theirs=names[1])]
    for what, one, other in (
        ("format of the suite", ours.format, theirs.format),
        ("turns asked", ours.num_turns, theirs.num_turns),
    ):
        if None not in (one, other) and one != other:  # reports of an earlier version hold neither
            return [Difference(aspect="suite", what=what, ours=str(one), theirs=str(other))]
    only_ours, only_theirs = set(ours.ids) - set(theirs.ids), set(theirs.ids) - set(ours.ids)
    if not only_ours and not only_theirs:
        return []
    return [
        Difference(
            aspect="suite",
            what="prompts",
            ours=f"{len(ours.ids)} of {ours.source}, {len(only_ours)} of them only",
            theirs=f"{len(theirs.ids)} of {theirs.source}, {len(only_theirs)} of them only",
        )
    ]


def _settings(ours: DecodeSection, theirs: DecodeSection) -> list[Difference]:
    """Compare the decoding settings; one that a report does not name counts as off."""
    found: list[Difference] = []
    gammas = (ours.num_speculative_tokens, theirs.num_speculative_tokens)
    if gammas[0] != gammas[1]:
        aspect: Aspect = "num_speculative_tokens"
        found.append(Difference(aspect=aspect, what=aspect, ours=str(gammas[0]), theirs=str(gammas[1])))
    greedy = ours.temperature == theirs.temperature == 0  # every rule is the same one then
    ignored = (*SAME_DISTRIBUTION, "verification") if greedy else SAME_DISTRIBUTION
    one, other = (decode.model_dump(exclude_unset=True) for decode in (ours, theirs))
    return found + [
        Difference(aspect="decode", what=f"decode.{key}", ours=str(one.get(key)), theirs=str(other.get(key)))
        for key in dict.fromkeys([*one, *other])
        if key not in ignored and one.get(key) != other.get(key)
    ]


def _lookups(ours: DraftSection, theirs: DraftSection) -> list[Difference]:
    """Compare what drafted beside the draft: its tokens are counted with the draft's."""
    named = [", ".join(each.lookups) or "none" for each in (ours, theirs)]
    if named[0] == named[1]:
        return []
    return [Difference(aspect="decode", what="lookups beside the draft", ours=named[0], theirs=named[1])]


def _machine(ours: Report, theirs: Report) -> list[Difference]:
    def described(report: Report) -> dict[str, Any]:
        hardware, versions = report.hardware, report.versions
        gpus = [gpu.get("name") for gpu in hardware.get("gpus") or []]
        return {
            **{f"hardware {key}": hardware.get(key) for key in MACHINE},
            "hardware gpus": gpus,
            **{f"version of {name}": versions.get(name) for name in SOFTWARE},
        }

    one, another = described(ours), described(theirs)
    return [
        Difference(aspect="machine", what=what, ours=str(one[what]), theirs=str(another[what]))
        for what in one
        if one[what] != another[what]
    ]

"""Several reports side by side: what each measured, and how it changed from the first. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import ascii_uppercase

from configs.runtime.errors import InputError
from eval.report.change import Aspect, Change, Difference, differences, speed_change, tau_change
from eval.report.markdown import as_markdown_table, escape
from eval.report.schema import Report, SuiteSection
from eval.report.tables import Table
from eval.report.text import VERDICTS, interval, number, significant, speedup, tau, warnings

FIXED: tuple[Aspect, ...] = ("target", "suite")  # what reports must agree in, unless allowed by name


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
    """Compare each report, by its path, with the first; target and suite may not differ unless they are named."""
    if not 2 <= len(reports) <= len(ascii_uppercase):
        raise InputError(f"from 2 to {len(ascii_uppercase)} reports can be compared, got {len(reports)}")
    (first_path, first), *others = reports
    entries = [ComparedReport(letter=ascii_uppercase[0], path=first_path, report=first)]
    for letter, (path, report) in zip(ascii_uppercase[1:], others, strict=False):
        entries.append(_entry(letter, path, report, first, may_differ_in))
    return entries


def _entry(letter: str, path: str, report: Report, first: Report, may_differ_in: Sequence[str]) -> ComparedReport:
    found = tuple(differences(report, first))
    aspects = dict.fromkeys(each.aspect for each in found)
    if refused := [aspect for aspect in aspects if aspect in FIXED and aspect not in may_differ_in]:
        named = "; ".join(str(each) for each in found if each.aspect in refused)
        raise InputError(
            f"{path} is not about the same as the first report: {named}. To compare them nevertheless: "
            f"--set may_differ_in=[{', '.join(refused)}]"
        )
    entry = ComparedReport(letter=letter, path=path, report=report, differences=found)
    if not _same_answers(report, first) or not aspects.keys().isdisjoint(FIXED):
        return entry
    other_clock = "machine" in aspects or any(each.what == "decode.dtype" for each in found)
    by_suite = {
        name: tau_change(report, first, suite=name)
        for name, section in report.suites.items()
        if name in first.suites and _same_answers(section, first.suites[name])
    }
    return replace(
        entry,
        tau=tau_change(report, first),
        speed=None if other_clock else speed_change(report, first),
        tau_by_suite={name: change for name, change in by_suite.items() if change is not None},
    )


def _same_answers(ours: SuiteSection, theirs: SuiteSection) -> bool:
    same_prompts = ours.prompts.sha256 == theirs.prompts.sha256
    return same_prompts and ours.acceptance.per_prompt.keys() == theirs.acceptance.per_prompt.keys()


def describe_change(change: Change | None) -> str:
    """Return `×1.04 [1.02, 1.06] better`, or `not significant` with the change that the prompts could have shown."""
    if change is None:
        return "–"
    if change.ratio_ci is None:
        return f"×{change.ratio:.2f}"
    words: str = change.outcome
    if change.outcome == "inconclusive":
        detectable = change.detectable_percent or 0.0
        words = "not significant" + (f" ({significant(detectable, 2)} % would show)" if detectable > 0.01 else "")
    return f"×{change.ratio:.2f} {interval(change.ratio_ci)} {words}"


def overview(entries: Sequence[ComparedReport]) -> Table:
    """Return a row a report: its numbers, and their change from the first."""
    rows = [
        (
            entry.letter,
            entry.path,
            str(entry.report.decode.num_speculative_tokens),
            f"{entry.report.prompts.num_prompts} of {entry.report.prompts.num_asked}",
            tau(entry.report.acceptance),
            describe_change(entry.tau),
            speedup(entry.report.speed),
            describe_change(entry.speed),
            number(entry.report.acceptance.overlap_alpha),
            VERDICTS[entry.report.lossless.verdict],
        )
        for entry in entries
    ]
    header = ("", "report", "drafts", "prompts", "τ", "τ against A", "decode speedup", "speed against A", "α", "output")
    return Table(title="Overview", header=header, rows=rows)


def notes(entries: Sequence[ComparedReport]) -> list[str]:
    """Return what changed on further suites, and what each report differs in from the first."""
    on_suites = [
        f"{entry.letter} on {name}: τ {number(change.ours)}, {describe_change(change)}"
        for entry in entries
        for name, change in entry.tau_by_suite.items()
    ]
    return on_suites + [f"{entry.letter} differs from A in {each}" for entry in entries for each in entry.differences]


def as_markdown(entries: Sequence[ComparedReport]) -> str:
    """Return the comparison for a pull request."""
    warned = [f"> **Warning:** {entry.letter}: {escape(each)}" for entry in entries for each in warnings(entry.report)]
    table = as_markdown_table(overview(entries), numbers=False)
    return "\n\n".join([f"## {len(entries)} reports", *warned, table, *map(escape, notes(entries))]) + "\n"

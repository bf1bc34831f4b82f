"""Several reports side by side: what each measured, how it stands against the first, and what they were made with otherwise.

Reports of different targets or prompts are refused unless they are allowed by name: their numbers are about different
things. Other differences, such as the number of drafts, are often the purpose of a comparison, and are listed. Torch-free.
`eval.comparison_page` makes a page of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from configs.errors import InputError
from eval.comparability import Difference, differences
from eval.paired import Change, Comparison, compare_reports
from eval.wording import VERDICTS, interval, number, times

MOST = 8  # lines that can be told apart in one picture
FIXED = ("target", "suite")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One report among others. The changes are from the first; `None` for the first and where they would say nothing."""

    letter: str
    path: str
    report: Mapping[str, Any]
    tau: Change | None = None  # of tokens per target step; needs the same target and prompts, all of them answered
    speed: Change | None = None  # of the decode speedup; needs the same machine and batches as well
    differences: tuple[Difference, ...] = ()


def compare(reports: Sequence[tuple[str, Mapping[str, Any]]], may_differ_in: Sequence[str] = ()) -> list[Entry]:
    """Set reports beside the first.

    Args:
        reports: (path, checked report) each, from 2 to `MOST`.
        may_differ_in: `target` and `suite` are refused to differ unless they are named here.

    Raises:
        InputError: too few or too many reports, or some that are not about the same thing.
    """
    if not 2 <= len(reports) <= MOST:
        raise InputError(f"from 2 to {MOST} reports can be compared, got {len(reports)}")
    (first_path, first), *others = reports
    entries = [Entry(letter=ascii_uppercase[0], path=first_path, report=first)]
    for letter, (path, report) in zip(ascii_uppercase[1:], others, strict=False):
        entries.append(_entry(letter, path, report, first, may_differ_in))
    return entries


def _entry(letter: str, path: str, report: Mapping[str, Any], first: Mapping[str, Any], may_differ_in: Sequence[str]) -> Entry:
    found = tuple(differences(report, first))
    refused = [each for each in found if each.aspect in FIXED and each.aspect not in may_differ_in]
    if refused:
        allow = ", ".join(dict.fromkeys(each.aspect for each in refused))
        raise InputError(
            f"{path} is not about the same as the first report: {'; '.join(map(str, refused))}. "
            f"To see them side by side all the same: --set may_differ_in=[{allow}]"
        )
    aspects: set[str] = {each.aspect for each in found}
    paired = _paired(report, first, aspects)
    return Entry(
        letter=letter,
        path=path,
        report=report,
        tau=None if paired is None else paired.tokens_per_target_step,
        speed=None if paired is None or "machine" in aspects or paired.batches_left_out else paired.decode_speedup,
        differences=found,
    )


def _paired(report: Mapping[str, Any], first: Mapping[str, Any], aspects: set[str]) -> Comparison | None:
    """Compare prompt by prompt, where both answered all of the same prompts for the same target."""
    ours, theirs = (each["acceptance"]["per_prompt"].keys() for each in (report, first))
    return compare_reports(report, first) if ours == theirs and not aspects & set(FIXED) else None


def in_words(change: Change | None) -> str:
    """Return `×1.04 [1.02, 1.06] better`; or `no difference shown`, with the change that the prompts could have shown."""
    if change is None:
        return ""
    if change.ratio_ci is None:
        return f"×{change.ratio:.2f}"
    words: str = change.outcome
    if change.outcome == "inconclusive":
        least = "" if not change.detectable_percent else f" ({change.detectable_percent:.2g} % would show)"
        words = f"no difference shown{least}"
    return f"×{change.ratio:.2f} {interval(change.ratio_ci)} {words}"


def as_table(entries: Sequence[Entry]) -> str:
    """Return the comparison for a terminal: a line a report, then what each was made with otherwise than the first."""
    header = ("", "report", "drafts", "prompts", "τ", "τ against A", "decode speedup", "speed against A", "α", "output")
    rows = [header, *(_row(entry) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [f"{entry.letter} differs from A in {difference}" for entry in entries for difference in entry.differences]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _row(entry: Entry) -> tuple[str, ...]:
    report = entry.report
    acceptance, speed = report["acceptance"], report["speed"] or {}
    return (
        entry.letter,
        entry.path,
        str(report["decode"]["num_speculative_tokens"]),
        f"{report['prompts']['num_prompts']} of {report['prompts']['num_asked']}",
        _ranged(number(acceptance["tokens_per_target_step"]), acceptance["tokens_per_target_step_ci"]),
        in_words(entry.tau),
        _ranged(times(speed.get("decode_speedup")), speed.get("decode_speedup_ci")),
        in_words(entry.speed),
        number(acceptance["overlap_alpha"]),
        VERDICTS[report["lossless"]["verdict"]] + (", SIMULATED" if report["simulated"] else ""),
    )


def _ranged(value: str, bounds: Sequence[float] | None) -> str:
    return f"{value} {interval(bounds)}".rstrip()

"""Several reports side by side: what each measured, how it stands against the first, and what they were made with otherwise.

Reports of different targets or prompts are refused unless they are allowed by name: their numbers are about different
things. Other differences, such as the number of drafts, are often the purpose of a comparison, and are listed. Torch-free.
`eval.report.html` makes a page of it.


What two reports were made with otherwise: the reasons why their numbers may not be put side by side.

A token count means something for one target, one set of prompts and one way of decoding; seconds also for one machine. The
gate refuses a baseline report over these differences (`eval.release.checks`), and `eval.report.compare` lists them beside the
numbers. Seeds are left out: they choose among samples of the same distribution. Versions are left out too: comparing them is
often the purpose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Literal

from configs.runtime.errors import InputError
from eval.report.text import VERDICTS, interval, number, short, times
from eval.stats.paired import Change, Comparison, compare_reports

Aspect = Literal["target", "suite", "num_speculative_tokens", "decode", "machine"]
IDENTITY = {"weights_sha256": "target weights", "tokenizer_sha256": "tokenizer", "chat_template_sha256": "chat template"}
MACHINE = ("cpu", "cores", "device", "threads", "processes")
SAME_DISTRIBUTION = ("seed", "warmup_prompts", "num_speculative_tokens")  # the last is an aspect of its own
NOT_RECORDED = "not recorded"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that two reports were made with otherwise."""

    aspect: Aspect
    what: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.what} ({self.ours} here, {self.theirs} there)"


def differences(report: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """Return what `report` (ours, here) and `other` (theirs, there) differ in, the gravest first; both checked reports."""
    return [
        *_target(report["target"], other["target"]),
        *_suite(report["prompts"], other["prompts"]),
        *_settings(report["decode"], other["decode"]),
        *_machine(report["hardware"], other["hardware"]),
    ]


def _target(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    def name(target: Mapping[str, Any], key: str) -> str:
        return f"{target['name']}, {short(target[key])}" if target.get(key) else NOT_RECORDED

    return [
        Difference(aspect="target", what=what, ours=name(ours, key), theirs=name(theirs, key))
        for key, what in IDENTITY.items()
        if ours.get(key) != theirs.get(key)
    ]


def _suite(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """Compare the prompts: the same file by its hash, and the same ones of it, in any order."""
    if ours["sha256"] != theirs["sha256"]:
        names = [f"{prompts['source']}, {short(prompts['sha256'])}" for prompts in (ours, theirs)]
        return [Difference(aspect="suite", what="prompts", ours=names[0], theirs=names[1])]
    for key, what in (("format", "format of the suite"), ("num_turns", "turns asked")):
        if None not in (ours.get(key), theirs.get(key)) and ours[key] != theirs[key]:  # reports of before it was kept hold none
            return [Difference(aspect="suite", what=what, ours=str(ours[key]), theirs=str(theirs[key]))]
    only_ours, only_theirs = set(ours["ids"]) - set(theirs["ids"]), set(theirs["ids"]) - set(ours["ids"])
    if not only_ours and not only_theirs:
        return []
    counts = [f"{len(prompts['ids'])} of {prompts['source']}" for prompts in (ours, theirs)]
    return [
        Difference(
            aspect="suite",
            what="prompts",
            ours=f"{counts[0]}, {len(only_ours)} of them only",
            theirs=f"{counts[1]}, {len(only_theirs)} of them only",
        )
    ]


def _settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """Compare how was decoded; a setting that one report does not name is taken for off."""
    gammas = [str(decode["num_speculative_tokens"]) for decode in (ours, theirs)]
    found: list[Difference] = []
    if gammas[0] != gammas[1]:
        aspect: Aspect = "num_speculative_tokens"
        found.append(Difference(aspect=aspect, what=aspect, ours=gammas[0], theirs=gammas[1]))
    greedy = ours.get("temperature") == theirs.get("temperature") == 0  # every rule is the same one then
    ignored = (*SAME_DISTRIBUTION, "verification") if greedy else SAME_DISTRIBUTION
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if key not in ignored]
    return found + [
        Difference(aspect="decode", what=f"decode.{key}", ours=str(ours.get(key)), theirs=str(theirs.get(key)))
        for key in keys
        if ours.get(key) != theirs.get(key)
    ]


def _machine(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    def described(hardware: Mapping[str, Any]) -> dict[str, Any]:
        return {**{key: hardware.get(key) for key in MACHINE}, "gpus": [gpu.get("name") for gpu in hardware.get("gpus") or []]}

    one, another = described(ours), described(theirs)
    return [
        Difference(aspect="machine", what=f"hardware {key}", ours=str(one[key]), theirs=str(another[key]))
        for key in one
        if one[key] != another[key]
    ]


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

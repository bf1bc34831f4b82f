"""Two or more reports: what they differ in, and how tau and the decode speedup changed on the same prompts. Torch-free.

A token count means something for one target, one set of prompts and one way of decoding; seconds also for one machine, one
version of torch and transformers, and one dtype. tau is compared by the counts of each prompt, speed by the speedup over plain
decoding in the same run, from the seconds of each batch: two runs at different times share no other clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import ascii_uppercase
from typing import Any, Literal, NamedTuple

import numpy as np

from configs.runtime.errors import InputError
from configs.schema.target import IDENTITY
from eval.report.schema import BatchSection, PromptsSection, Report, ServedSection, SuiteSection
from eval.report.tables import Table, as_markdown_table, escape
from eval.report.text import VERDICTS, interval, number, short, speedup, tau, warnings
from eval.stats import Column, Floats, Interval, statistic_interval

Aspect = Literal["target", "suite", "decode", "machine"]
MACHINE = ("cpu", "cores", "device", "threads", "processes")
FIXED: tuple[Aspect, ...] = ("target", "suite")  # in which reports must agree for their numbers to be compared
SOFTWARE = ("torch", "transformers")  # whose versions decide the seconds too
Counts = Mapping[str, Sequence[int]]  # prompt id -> [committed tokens, rounds]
OF_SUFFIX_LOOKUP = ("lookup_expects", "lookup_answer_tokens")  # which is measured beside the draft


@dataclass(frozen=True)
class Difference:
    """One thing that two reports differ in."""

    aspect: Aspect
    what: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        return f"{self.what} ({self.ours} here, {self.theirs} there)"


def differences(report: Report, other: Report) -> list[Difference]:
    """Return what `report` (ours, here) and `other` (theirs, there) differ in, the most important first.

    A decoding setting that a report does not name counts as off.
    """
    of_target = []
    for key, what in IDENTITY.items():
        digests = [getattr(each.target, key) for each in (report, other)]
        if digests[0] != digests[1]:
            names = (
                digest and f"{each.target.name}, {short(digest)}" for each, digest in zip((report, other), digests, strict=True)
            )
            of_target.append(Difference("target", what, *names))
    pairs: list[tuple[Aspect, str, Any, Any]] = []
    here, there = (each.decode.model_dump(exclude_unset=True) for each in (report, other))
    greedy = here["temperature"] == there["temperature"] == 0  # every rule is the same one then
    ignored = {"seed", "warmup_prompts", *OF_SUFFIX_LOOKUP, *(["verification"] if greedy else [])}
    keys = [key for key in dict.fromkeys([*here, *there]) if key not in ignored]
    pairs += [("decode", f"decode.{key}", here.get(key), there.get(key)) for key in keys]
    pairs += [("machine", f"hardware {key}", report.hardware.get(key), other.hardware.get(key)) for key in MACHINE]
    gpus, their_gpus = ([gpu.get("name") for gpu in each.hardware.get("gpus") or []] for each in (report, other))
    pairs.append(("machine", "hardware gpus", gpus, their_gpus))
    pairs += [("machine", f"version of {key}", report.versions.get(key), other.versions.get(key)) for key in SOFTWARE]
    others = [Difference(*pair) for pair in pairs if pair[2] != pair[3]]
    return [*of_target, *prompt_differences(report.prompts, other.prompts), *others]


def prompt_differences(ours: PromptsSection, theirs: PromptsSection) -> list[Difference]:
    """Compare the prompts of a suite: the same file by its hash, and the same ones of it, in any order."""
    if ours.sha256 != theirs.sha256:
        return [Difference("suite", "prompts", *(f"{each.source}, {short(each.sha256)}" for each in (ours, theirs)))]
    for what, one, other in (("format of the suite", ours.format, theirs.format), ("turns", ours.num_turns, theirs.num_turns)):
        if one != other:
            return [Difference("suite", what, one, other)]
    if set(ours.ids) == set(theirs.ids):
        return []
    only = (set(ours.ids) - set(theirs.ids), set(theirs.ids) - set(ours.ids))
    sides = (f"{len(each.ids)}, {len(own)} of them only" for each, own in zip((ours, theirs), only, strict=True))
    return [Difference("suite", "prompts", *sides)]


# --- change -------------------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """How one number changed; better or worse where the whole interval of the ratio lies above or below 1."""

    ours: float
    theirs: float
    ratio: Interval

    @property
    def outcome(self) -> Literal["better", "worse", "not significant"]:
        low, high = self.ratio.bounds or (-math.inf, math.inf)
        return "better" if low > 1 else "worse" if high < 1 else "not significant"


def tau_change(report: Report, other: Report, suite: str | None = None) -> Change | None:
    """Return how tokens per target step changed from `other` to `report`, on the prompts of a suite that both answered.

    The suite is a further one of both, or the first.
    """
    ours, theirs = (section.acceptance.per_prompt for section in _sections(report, other, suite))
    if ours.keys().isdisjoint(theirs):
        raise InputError("the reports cannot be compared: they have no answered prompt in common")
    return _counts_change(ours, theirs)


def served_change(report: Report, served: ServedSection) -> Change | None:
    """Return how tokens per target step in an engine compare with the report's, on the prompts of both.

    `None` where no suite is of the engine's file, or the two decode otherwise: drafts a round, tree, sampling. Engines take the
    draft's likeliest tokens.
    """
    decode, counts, asked = report.decode, served.per_prompt, dict[str, Any](temperature=0.0)
    if decode.temperature > 0:
        counts, asked = served.sampled_per_prompt, (served.sampling or asked) | {"verification": "one_hot"}
    asked |= dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"))
    sections = [each for each in (report, *report.suites.values()) if each.prompts.sha256 == served.prompts_sha256]
    alike = decode.num_speculative_tokens == served.num_speculative_tokens and decode.tree is None
    alike = alike and all(getattr(decode, key, None) == value for key, value in asked.items())
    return _counts_change(counts, sections[0].acceptance.per_prompt) if alike and sections else None


def _counts_change(ours: Counts, theirs: Counts) -> Change | None:
    common = [prompt_id for prompt_id in ours if prompt_id in theirs]
    columns = [[counts[prompt_id][column] for prompt_id in common] for counts in (ours, theirs) for column in (0, 1)]
    return _change(lambda sums: sums[0] / sums[1], columns)


def speed_change(report: Report, other: Report, suite: str | None = None) -> Change | None:
    """Return how the decode speedup changed; None where the two did not time the same batches. See `tau_change`."""
    ours, theirs = map(_batches, _sections(report, other, suite))
    if not ours or ours.keys() != theirs.keys():
        return None
    rows = [
        [number for each in (ours[key], theirs[key]) for number in (*each.autoregressive, *each.speculative)] for key in ours
    ]
    return _change(lambda sums: (sums[0] / sums[1]) / (sums[2] / sums[3]), list(zip(*rows, strict=True)))


def _change(number: Callable[[Floats], Floats], columns: Sequence[Column]) -> Change | None:
    """Return how a number of the sums of some columns changed, `columns` being ours and as many of theirs.

    What makes a prompt hard or easy for both sides cancels. `None` where one has nothing to divide by.
    """
    size = len(columns) // 2
    ratio = statistic_interval(lambda sums: number(sums[:size]) / number(sums[size:]), *columns, is_ratio=True)
    if ratio.point is None:
        return None
    sums = np.array(columns, dtype=np.float64).sum(axis=1)
    return Change(float(number(sums[:size])), float(number(sums[size:])), ratio)


def _sections(report: Report, other: Report, suite: str | None) -> list[SuiteSection]:
    found: list[SuiteSection] = []
    for each in (report, other):
        if suite is not None and suite not in each.suites:
            raise InputError(f"one of the reports has no suite {suite!r}; evaluate both on the same suites")
        found.append(each if suite is None else each.suites[suite])
    if found[0].prompts.sha256 != found[1].prompts.sha256:
        files = " and ".join(f"{each.prompts.source} ({short(each.prompts.sha256)})" for each in found)
        raise InputError(f"the reports cannot be compared: their prompts come from {files}, which differ")
    return found


def _batches(section: SuiteSection) -> dict[tuple[str, ...], BatchSection]:
    return {tuple(batch.prompt_ids): batch for batch in (section.speed.per_batch if section.speed else ())}


# --- side by side ---------------------------------------------------------------------------------------------------


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


def compare(reports: Sequence[tuple[str, Report]]) -> list[ComparedReport]:
    """Compare each report, by its path, with the first."""
    if not 2 <= len(reports) <= len(ascii_uppercase):
        raise InputError(f"from 2 to {len(ascii_uppercase)} reports can be compared, got {len(reports)}")
    (first_path, first), *others = reports
    return [
        ComparedReport(letter=ascii_uppercase[0], path=first_path, report=first),
        *(_entry(letter, *other, first) for letter, other in zip(ascii_uppercase[1:], others, strict=False)),
    ]


def _entry(letter: str, path: str, report: Report, first: Report) -> ComparedReport:
    found = tuple(differences(report, first))
    entry = ComparedReport(letter=letter, path=path, report=report, differences=found)
    aspects = {each.aspect for each in found}
    if not _same_answers(report, first) or not aspects.isdisjoint(FIXED):
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
    """Return `×1.04 [1.02, 1.06] better`, or `not significant` in its place."""
    if change is None:
        return "–"
    bounds = change.ratio.bounds
    return f"×{change.ratio.point:.2f}" + (f" {interval(bounds)} {change.outcome}" if bounds else "")


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

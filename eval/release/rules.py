"""One rule of a gate: a threshold on a number of the report, by itself, in every category, or as a ratio to a baseline report.

The interval is judged, not the point: it must clear the threshold as a whole, and where it holds the threshold the finding
is inconclusive. Each rule is judged at the report's own level; a gate of twenty rules is not corrected for their number,
because all of them have to pass. Torch-free and pure; `eval.release.checks` puts the findings together.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import replace

from configs.runtime.errors import InputError
from configs.schema.evaluation import GateRule
from eval.release.verdict import Finding, GateOutcome
from eval.report.paired import compare_reports
from eval.report.schema import BaselineSection, Report, SuiteSection
from eval.report.sections import ClosedSection
from eval.stats.bootstrap import Interval
from eval.stats.paired import Change

PAIRED_TAU = "acceptance.tokens_per_target_step"
PAIRED = (PAIRED_TAU, "speed.decode_speedup")  # whose counts and seconds a report keeps prompt by prompt
NO_METRICS = (
    "acceptance.per_prompt.",
    "speed.per_batch.",
    "samples.",
    "lossless.divergences.",
    "statistics.",
    "schema_version",
)
EVERY_CATEGORY = "by_category.*."
OF_A_MACHINE = ("speed", "seconds", "joules")  # in a metric's name: it means something on one machine only
MORE_THAN_ONE = math.nextafter(1.0, math.inf)  # a draft that only equals what is free is not worth its training


def judge_rule(report: Report, rule: GateRule, baseline: Report | None) -> list[Finding]:
    """Return what the rule finds: one finding, or one for each category; `baseline` can be compared with the report.

    Raises:
        InputError: no such number or suite, no interval to it, or no baseline report to be relative to.
    """
    metrics, own = [rule.metric], rule.metric.removeprefix(EVERY_CATEGORY)
    section, place = _suite_of(report, rule)
    if own != rule.metric:
        metrics = [f"by_category.{category}.{own}" for category in section.by_category]
    return [_judge_metric(report, f"{place}{metric}", rule, baseline) for metric in metrics]


def judge_against_free(report: Report, name: str) -> list[Finding]:
    """Compare the draft with a way of decoding that needs no training: in tokens per target step, and in speed.

    Raises:
        InputError: the report does not hold that way of decoding.
    """
    if name not in report.baselines:
        known = ", ".join(report.baselines) or "none"
        raise InputError(f"must_beat: the report has no baseline {name!r} (it has: {known}); name it in eval's `baselines`")
    free = report.baselines[name]
    pairs: tuple[tuple[str, ClosedSection | None, str], ...] = (
        ("tokens_per_target_step", report.acceptance, "tokens_per_target_step_ratio"),
        ("decode_speedup", report.speed, "decode_speed_ratio"),
    )
    return [
        _finding(f"{metric} against {name}", _over_free(own, free, metric, paired), "more than 1 times", MORE_THAN_ONE)
        for metric, own, paired in pairs
    ]


def is_of_a_machine(rule: GateRule) -> bool:
    """Say whether the rule's number means something on one machine only, as all seconds do."""
    return any(word in rule.metric for word in OF_A_MACHINE)


def _suite_of(report: Report, rule: GateRule) -> tuple[Report | SuiteSection, str]:
    """Return what was measured on the rule's suite, and the beginning of the paths of its numbers."""
    if rule.suite is None or rule.suite == report.prompts.suite:
        return report, ""
    if rule.suite not in report.suites:
        known = ", ".join([report.prompts.suite or report.prompts.source, *report.suites])
        raise InputError(f"rules: the report has no suite {rule.suite!r} (it has: {known}); name it in eval's `suites`")
    return report.suites[rule.suite], f"suites.{rule.suite}."


def _judge_metric(report: Report, metric: str, rule: GateRule, baseline: Report | None) -> Finding:
    """Compare one metric, or its ratio to the baseline's, with the rule's threshold."""
    interval = _look_up(report, metric, rule, "report")
    if rule.relative_to_baseline:
        if baseline is None:
            raise InputError(f"rule on {metric} is relative to a baseline report; give one with --baseline previous.json")
        interval = _relative(report, baseline, metric, rule, interval)
    threshold = f"at least {rule.min:g}" if rule.min is not None else f"at most {rule.max:g}"
    required = threshold + (" times the baseline" if rule.relative_to_baseline else "")
    if rule.bound == "point":
        judged = _finding(metric, Interval(interval.point, interval.point, interval.point), required, rule.min, rule.max)
        return replace(judged, low=None, high=None)
    return _finding(metric, interval, required, rule.min, rule.max)


def _finding(
    check: str, interval: Interval, required: str, minimum: float | None = None, maximum: float | None = None
) -> Finding:
    """Judge an interval by a minimum or a maximum."""
    outcome, reason = _compare(interval, minimum, maximum)
    return Finding(
        check=check,
        outcome=outcome,
        value=interval.point,
        low=interval.low,
        high=interval.high,
        required=required,
        reason=reason,
    )


def _compare(interval: Interval, minimum: float | None, maximum: float | None) -> tuple[GateOutcome, str]:
    """Return the outcome and, unless it passed, the reason."""
    if interval.point is None:
        return "fail", "not measured in this report"
    low, high = interval.low, interval.high
    if low is None or high is None:
        return "inconclusive", "no interval: fewer than two prompts (or batches, for speed) were measured"
    if (minimum is not None and low >= minimum) or (maximum is not None and high <= maximum):
        return "pass", ""
    if (minimum is not None and high < minimum) or (maximum is not None and low > maximum):
        return "fail", "below the threshold" if minimum is not None else "above the threshold"
    return "inconclusive", "the interval holds the threshold: measure more prompts, or ask for less"


# --- looking up ---------------------------------------------------------------------------------------------------


def _look_up(report: Report, metric: str, rule: GateRule, where: str) -> Interval:
    """Return a metric with the interval that stands beside it as `..._ci`; both may be unmeasured (`None`).

    Raises:
        InputError: no such metric, or it comes without an interval although the rule asks for its bounds.
    """
    numbers = {path: number for path, number in report.numbers().items() if not path.startswith(NO_METRICS)}
    if _under_null(metric, numbers):
        return Interval(None)
    if metric not in numbers:
        metrics = [path for path in numbers if "_ci" not in path]
        nearest = difflib.get_close_matches(metric, metrics, n=1, cutoff=0.0)
        raise InputError(f"rules: the {where} has no number {metric!r}; the nearest is {nearest[0]!r}")
    bounds = f"{metric}_ci"
    if rule.bound == "confidence" and bounds not in numbers and f"{bounds}.0" not in numbers:
        raise InputError(f"rules: {metric} comes without an interval; give its rule `bound: point`")
    return Interval(numbers[metric], numbers.get(f"{bounds}.0"), numbers.get(f"{bounds}.1"))


def _under_null(metric: str, numbers: Mapping[str, float | None]) -> bool:
    """Say whether a whole section above the metric is null, as `speed` is in a run that timed nothing."""
    keys = metric.split(".")
    sections = (".".join(keys[:depth]) for depth in range(1, len(keys)))
    return any(section in numbers and numbers[section] is None for section in sections)


# --- ratios -------------------------------------------------------------------------------------------------------


def _relative(report: Report, baseline: Report, metric: str, rule: GateRule, ours: Interval) -> Interval:
    """Return ours / theirs: paired by prompt where the reports allow it, else from bounds that assume the worst.

    Raises:
        InputError: the baseline's number is missing, or nothing to divide by.
    """
    theirs = _look_up(baseline, metric, rule, "baseline report")
    divisor = theirs.low if rule.bound == "confidence" and theirs.low is not None else theirs.point
    if theirs.point is None or divisor is None or divisor <= 0:
        raise InputError(f"rules: {metric} is {divisor} in the baseline report; a ratio needs a number above 0")
    if ours.point is None:
        return ours
    change = _paired(report, baseline, metric, rule)
    return _worst_ratio(ours, theirs) if change is None else Interval(change.ratio, *(change.ratio_ci or (None, None)))


def _paired(report: Report, baseline: Report, metric: str, rule: GateRule) -> Change | None:
    """Return how a number of a whole suite changed, prompt by prompt; `None` where the reports do not keep it by prompt."""
    if rule.metric not in PAIRED:
        return None
    suite = rule.suite if metric != rule.metric else None
    # The prompts were found to be the same; where our own run left some unanswered, that fails by itself.
    found = compare_reports(report, baseline, allow_unequal=True, suite=suite)
    if rule.metric == PAIRED_TAU:
        return found.tokens_per_target_step
    return None if found.batches_left_out else found.decode_speedup


def _over_free(own: ClosedSection | None, free: BaselineSection, metric: str, paired: str) -> Interval:
    """Return the draft's number over a free way's: as the run paired them, else from bounds that assume the worst."""
    if (ratio := _with_bounds(free, paired)).point is not None:
        return ratio
    ours, theirs = _with_bounds(own, metric), _with_bounds(free, metric)
    return Interval(None) if ours.point is None or not theirs.point else _worst_ratio(ours, theirs)


def _with_bounds(section: ClosedSection | None, metric: str) -> Interval:
    point, bounds = (None, None) if section is None else section.interval_of(metric)
    return Interval(point, *(bounds or (None, None)))


def _worst_ratio(ours: Interval, theirs: Interval) -> Interval:
    """Return ours / theirs with bounds that hold whatever the two have in common; both are measured, theirs not 0."""
    assert ours.point is not None
    assert theirs.point
    point = ours.point / theirs.point
    if ours.low is None or ours.high is None or not theirs.low or theirs.high is None:
        return Interval(point)
    return Interval(point, ours.low / theirs.high, ours.high / theirs.low)

"""One rule of a gate: a threshold on a number of the report, by itself, in every category, or as a ratio to a baseline report.

The interval is judged, not the point: it must clear the threshold as a whole, and where it holds the threshold the finding
is inconclusive. Each rule is judged at the report's own level; a gate of twenty rules is not corrected for their number,
because all of them have to pass. Torch-free and pure.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from configs.runtime.errors import InputError
from configs.schema.evaluation import GateRule
from eval.release.verdict import Finding, GateOutcome
from eval.report.change import speed_change, tau_change
from eval.report.schema import Report, SuiteSection
from eval.stats.bootstrap import Interval

PAIRED = {"acceptance.tokens_per_target_step": tau_change, "speed.decode_speedup": speed_change}
EVERY_CATEGORY = "by_category.*."
MORE_THAN_ONE = math.nextafter(1.0, math.inf)  # a draft that only equals what is free is not worth its training


def judge_rule(report: Report, rule: GateRule, baseline: Report | None) -> list[Finding]:
    """Return what the rule finds: one finding, or one for each category; `baseline` can be compared with the report."""
    section: SuiteSection = report
    place = ""
    if rule.suite is not None and rule.suite != report.prompts.suite:
        if rule.suite not in report.suites:
            known = ", ".join([report.prompts.suite or report.prompts.source, *report.suites])
            raise InputError(f"rules: the report has no suite {rule.suite!r} (it has: {known}); name it in eval's `suites`")
        section, place = report.suites[rule.suite], f"suites.{rule.suite}."
    metrics, own = [rule.metric], rule.metric.removeprefix(EVERY_CATEGORY)
    if own != rule.metric:
        metrics = [f"by_category.{category}.{own}" for category in section.by_category]
    return [_judge_metric(report, f"{place}{metric}", rule, baseline) for metric in metrics]


def judge_against_free(report: Report, name: str) -> list[Finding]:
    """Compare the draft with a way of decoding that needs no training: in tokens per target step, and in speed."""
    if name not in report.baselines:
        known = ", ".join(report.baselines) or "none"
        raise InputError(f"must_beat: the report has no baseline {name!r} (it has: {known}); name it in eval's `baselines`")
    free = report.baselines[name]
    ratios = {"tokens_per_target_step": "tokens_per_target_step_ratio", "decode_speedup": "decode_speed_ratio"}
    return [
        _finding(f"{metric} against {name}", Interval(point, *(bounds or ())), "more than 1 times", MORE_THAN_ONE)
        for metric, (point, bounds) in ((metric, free.interval_of(ratio)) for metric, ratio in ratios.items())
    ]


def _judge_metric(report: Report, metric: str, rule: GateRule, baseline: Report | None) -> Finding:
    interval = _look_up(report, metric, rule)
    required = f"at least {rule.min:g}" if rule.min is not None else f"at most {rule.max:g}"
    if rule.relative_to_baseline:
        required += " times the baseline"
        interval = _relative(report, baseline, rule, metric) if interval.point is not None else interval
    return _finding(metric, interval, required, rule.min, rule.max, by_point=rule.bound == "point")


def _relative(report: Report, baseline: Report | None, rule: GateRule, metric: str) -> Interval:
    """Return the metric's ratio to the baseline's, paired by prompt or by batch."""
    if baseline is None:
        raise InputError(f"rule on {metric} is relative to a baseline report; give one with --baseline previous.json")
    if rule.metric not in PAIRED:
        raise InputError(f"rules: {rule.metric} cannot be relative to a baseline; {' and '.join(PAIRED)} can")
    change = PAIRED[rule.metric](report, baseline, rule.suite if metric != rule.metric else None)
    if change is None:
        raise InputError(f"rules: {metric} cannot be relative to the baseline report, which did not time the same batches")
    return Interval(change.ratio, *(change.ratio_ci or ()))


def _finding(
    check: str,
    found: Interval,
    required: str,
    minimum: float | None = None,
    maximum: float | None = None,
    *,
    by_point: bool = False,
) -> Finding:
    """Judge an interval, or its point alone, by a minimum or a maximum."""
    low, high = (found.point, found.point) if by_point else (found.low, found.high)
    outcome: GateOutcome
    if found.point is None:
        outcome, reason = "fail", "not measured in this report"
    elif low is None or high is None:
        outcome, reason = "inconclusive", "no interval: fewer than two prompts (or batches, for speed) were measured"
    elif (minimum is not None and low >= minimum) or (maximum is not None and high <= maximum):
        outcome, reason = "pass", ""
    elif (minimum is not None and high < minimum) or (maximum is not None and low > maximum):
        outcome, reason = "fail", "below the threshold" if minimum is not None else "above the threshold"
    else:
        outcome, reason = "inconclusive", "the interval holds the threshold: measure more prompts, or ask for less"
    shown = {} if by_point else {"low": low, "high": high}
    return Finding(check=check, outcome=outcome, value=found.point, required=required, reason=reason, **shown)


# --- looking up ---------------------------------------------------------------------------------------------------


def _look_up(report: Report, metric: str, rule: GateRule) -> Interval:
    """Return a metric with the interval that stands beside it as `..._ci`; both may be unmeasured (`None`)."""
    try:
        point = _value_at(report, metric)
    except KeyError as error:
        raise InputError(f"rules: the report has no number {metric!r}{error.args[0]}") from error
    if not isinstance(point, int | float | None) or isinstance(point, bool):
        raise InputError(f"rules: {metric!r} of the report is no number")
    try:
        bounds = _value_at(report, f"{metric}_ci")
    except KeyError as error:
        if rule.bound == "confidence":
            raise InputError(f"rules: {metric} comes without an interval; give its rule `bound: point`") from error
        bounds = None
    return Interval(point, *(bounds or ()))


def _value_at(section: Any, path: str, before: str = "") -> Any:
    """Return what stands at a dotted path, `None` under a section that is null; names in the path may hold dots."""
    if section is None or not path:
        return section
    items = enumerate(section) if isinstance(section, list) else section.items() if isinstance(section, Mapping) else ()
    children = {str(name): child for name, child in (section if isinstance(section, BaseModel) else items)}
    fitting = [name for name in children if f"{path}.".startswith(f"{name}.")]
    if not fitting:
        nearest = difflib.get_close_matches(path, children, n=1, cutoff=0.0)
        raise KeyError(f"; the nearest is {before + nearest[0]!r}" if nearest else "")
    name = max(fitting, key=len)
    return _value_at(children[name], path[len(name) + 1 :], f"{before}{name}.")

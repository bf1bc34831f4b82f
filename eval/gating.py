"""Judging a report by a gate's rules: pass, fail, or inconclusive where the interval still holds the threshold.

Some checks no rule can switch off: a simulated report never passes, a run must have answered every prompt it was asked, and
the losslessness verdict must be one that the gate allows. Torch-free and pure; `eval.gate` is the command.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from configs.errors import InputError
from configs.schema import GateConfig, GateRule
from eval.intervals import Interval, paired_ratio_interval
from eval.report_schema import numbers_of

Outcome = Literal["pass", "fail", "inconclusive"]
PAIRED_METRIC = "acceptance.tokens_per_target_step"  # the one whose counts a report keeps prompt by prompt
NO_METRICS = ("acceptance.per_prompt.", "samples.", "lossless.divergences.", "statistics.", "schema_version")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found; `low` and `high` only where an interval was judged."""

    check: str
    outcome: Outcome
    value: float | str | None
    low: float | None = None
    high: float | None = None
    required: str
    reason: str = ""  # why it did not pass


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All findings, and what they come to: any failure fails, else anything inconclusive leaves it open."""

    findings: tuple[Finding, ...]

    @property
    def outcome(self) -> Outcome:
        """The worst outcome among the findings."""
        outcomes = {finding.outcome for finding in self.findings}
        return "fail" if "fail" in outcomes else "inconclusive" if "inconclusive" in outcomes else "pass"


def judge(report: Mapping[str, Any], config: GateConfig, baseline: Mapping[str, Any] | None = None) -> Verdict:
    """Apply the checks that always hold, then every rule.

    Args:
        report: a checked report (`eval.report_schema.read_report`).
        config: the gate.
        baseline: an earlier checked report, for rules with `relative_to_baseline`.

    Raises:
        InputError: a rule names an unknown metric, asks for an interval that its metric has not, or needs a baseline report.
    """
    if baseline is not None and baseline["simulated"]:
        raise InputError("the baseline report is simulated; compare with a measured one")
    always = (_judge_measured(report), _judge_lossless(report, config), _judge_prompts(report, config))
    return Verdict(findings=(*always, *(_judge_rule(report, rule, baseline) for rule in config.rules)))


# --- checks that always hold --------------------------------------------------------------------------------------


def _judge_measured(report: Mapping[str, Any]) -> Finding:
    simulated = report["simulated"]
    return Finding(
        check="simulated",
        outcome="fail" if simulated else "pass",
        value="simulated" if simulated else "measured",
        required="measured",
        reason="acceptance was drawn, not measured" if simulated else "",
    )


def _judge_lossless(report: Mapping[str, Any], config: GateConfig) -> Finding:
    section = report["lossless"]
    verdict, found = section["verdict"], len(section["divergences"])
    reason = ""
    if verdict not in config.lossless and found:
        reason = f"{found} difference{'s' * (found > 1)} from plain decoding in {section['checked_prompts']} checked answers"
    elif verdict not in config.lossless:
        reason = "no checked answer differs from plain decoding, but the gate does not allow this verdict"
    elif section["checked_prompts"] == 0:
        reason = "no answer was checked against plain decoding"
    return Finding(
        check="lossless",
        outcome="fail" if reason else "pass",
        value=verdict,
        required=" or ".join(config.lossless) or "nothing (the gate allows no verdict)",
        reason=reason,
    )


def _judge_prompts(report: Mapping[str, Any], config: GateConfig) -> Finding:
    prompts = report["prompts"]
    measured, asked, num_failed = prompts["num_prompts"], prompts["num_asked"], len(prompts["failed"])
    reason = ""
    if num_failed:
        reason = f"{num_failed} requests failed, the first on prompt {prompts['failed'][0]['prompt_id']}"
    elif measured != asked:
        reason = f"{asked - measured} of the {asked} prompts asked for were not answered"
    elif measured < config.min_prompts:
        reason = f"the gate asks for at least {config.min_prompts} prompts (min_prompts)"
    return Finding(
        check="prompts",
        outcome="fail" if reason else "pass",
        value=float(measured),
        required=f"all {asked} asked for, at least {config.min_prompts}",
        reason=reason,
    )


# --- rules --------------------------------------------------------------------------------------------------------


def _judge_rule(report: Mapping[str, Any], rule: GateRule, baseline: Mapping[str, Any] | None) -> Finding:
    """Compare one metric, or its ratio to the baseline's, with the rule's threshold."""
    interval = _look_up(report, rule, "report")
    if rule.relative_to_baseline:
        if baseline is None:
            raise InputError(f"rule on {rule.metric} is relative to a baseline report; give one with --baseline previous.json")
        interval = _relative(report, baseline, rule, interval)
    outcome, reason = _compare(interval, rule)
    threshold = f"at least {rule.min:g}" if rule.min is not None else f"at most {rule.max:g}"
    return Finding(
        check=rule.metric,
        outcome=outcome,
        value=interval.point,
        low=interval.low if rule.bound == "confidence" else None,
        high=interval.high if rule.bound == "confidence" else None,
        required=threshold + (" times the baseline" if rule.relative_to_baseline else ""),
        reason=reason,
    )


def _compare(interval: Interval, rule: GateRule) -> tuple[Outcome, str]:
    """Return the outcome and, unless it passed, the reason."""
    if interval.point is None:
        return "fail", "not measured in this report"
    low, high = (interval.point, interval.point) if rule.bound == "point" else (interval.low, interval.high)
    if low is None or high is None:
        return "inconclusive", "no interval: fewer than two prompts (or batches, for speed) were measured"
    if rule.min is not None and low >= rule.min:
        return "pass", ""
    if rule.max is not None and high <= rule.max:
        return "pass", ""
    if (rule.min is not None and high < rule.min) or (rule.max is not None and low > rule.max):
        return "fail", "below the threshold" if rule.min is not None else "above the threshold"
    return "inconclusive", "the interval holds the threshold: measure more prompts, or ask for less"


def _look_up(report: Mapping[str, Any], rule: GateRule, where: str) -> Interval:
    """Return a metric with the interval that stands beside it as `..._ci`; both may be unmeasured (`None`).

    Raises:
        InputError: no such metric, or it comes without an interval although the rule asks for its bounds.
    """
    numbers = {path: number for path, number in numbers_of(report) if not path.startswith(NO_METRICS)}
    if _under_null(rule.metric, numbers):
        return Interval(None)
    if rule.metric not in numbers:
        metrics = [path for path in numbers if "_ci" not in path]
        nearest = difflib.get_close_matches(rule.metric, metrics, n=1, cutoff=0.0)
        raise InputError(f"rules: the {where} has no number {rule.metric!r}; the nearest is {nearest[0]!r}")
    bounds = f"{rule.metric}_ci"
    if rule.bound == "confidence" and bounds not in numbers and f"{bounds}.0" not in numbers:
        raise InputError(f"rules: {rule.metric} comes without an interval; give its rule `bound: point`")
    return Interval(numbers[rule.metric], numbers.get(f"{bounds}.0"), numbers.get(f"{bounds}.1"))


def _under_null(metric: str, numbers: Mapping[str, float | None]) -> bool:
    """Say whether a whole section above the metric is null, as `speed` is in a run that timed nothing."""
    keys = metric.split(".")
    sections = (".".join(keys[:depth]) for depth in range(1, len(keys)))
    return any(section in numbers and numbers[section] is None for section in sections)


# --- relative to a baseline report --------------------------------------------------------------------------------


def _relative(report: Mapping[str, Any], baseline: Mapping[str, Any], rule: GateRule, ours: Interval) -> Interval:
    """Return ours / theirs: paired by prompt where both reports allow it, else from bounds that assume the worst.

    Raises:
        InputError: the baseline's number is missing, or nothing to divide by.
    """
    theirs = _look_up(baseline, rule, "baseline report")
    divisor = theirs.low if rule.bound == "confidence" and theirs.low is not None else theirs.point
    if theirs.point is None or divisor is None or divisor <= 0:
        raise InputError(f"rules: {rule.metric} is {divisor} in the baseline report; a ratio needs a number above 0")
    if ours.point is None:
        return ours
    if rule.metric == PAIRED_METRIC and _same_prompts(report, baseline):
        return _paired(report, baseline)
    point = ours.point / theirs.point
    if rule.bound == "point" or ours.low is None or ours.high is None or theirs.low is None or theirs.high is None:
        return Interval(point)
    return Interval(point, ours.low / theirs.high, ours.high / theirs.low)


def _same_prompts(report: Mapping[str, Any], baseline: Mapping[str, Any]) -> bool:
    """Say whether both reports measured the same prompts of the same file."""
    ours, theirs = ((each["prompts"]["sha256"], each["acceptance"]["per_prompt"].keys()) for each in (report, baseline))
    return ours == theirs


def _paired(report: Mapping[str, Any], baseline: Mapping[str, Any]) -> Interval:
    """Return the ratio of the two reports' tokens per target step, with the same prompts drawn for both."""
    ours, theirs = report["acceptance"]["per_prompt"], baseline["acceptance"]["per_prompt"]
    statistics = report["statistics"]
    columns: Sequence[list[int]] = [
        [counts[prompt_id][column] for prompt_id in ours] for counts in (ours, theirs) for column in (0, 1)
    ]
    return paired_ratio_interval(
        *columns, samples=statistics["bootstrap_samples"], seed=statistics["seed"], level=statistics["level"]
    )

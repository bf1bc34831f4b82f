"""Judging a report by a gate: pass, fail, or inconclusive where the interval contains the threshold.

Some checks no rule can switch off: a run must have answered every prompt it was asked, the losslessness verdict must be one
that the gate allows, and the draft must be the one that is to be released, made for the target it was measured with; where an
engine has served it, that must have gone well. A baseline report that cannot be compared with is refused. Rules judge an
interval, not its point, each at the report's own level: a gate of twenty rules is not corrected for their number, because all
of them have to pass. Torch-free and pure; `eval.gate` is the command.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from configs.runtime.errors import InputError
from configs.schema.evaluation import RELATIVE, GateConfig, GateRule
from configs.schema.target import IDENTITY
from eval.report.comparison import differences, prompt_differences, served_change, speed_change, tau_change
from eval.report.schema import PromptsSection, Report, ServedSection, SuiteSection
from eval.report.tables import Table, as_markdown_table, as_text, code, escape
from eval.report.text import (
    UNTESTED,
    by_suite,
    describe_checks,
    exactness,
    fastest_free,
    headline,
    settings,
    short,
    significant,
    warnings,
)
from eval.stats import Interval

PAIRED = dict(zip(RELATIVE, (tau_change, speed_change), strict=True))
EVERY_CATEGORY = "by_category.*."
# Metrics that say what the draft is worth: tau, speed, and ratios of these to another way of decoding.
WORTH = re.compile(
    r"(by_category\..+\.)?(acceptance\.tokens_per_target_step(_macro)?|speed\.(decode|end_to_end)_speedup)|baselines\..+_ratio"
)
SERVED_SHARE = 0.9  # of the report's tau, below which an engine's fails whatever the gate asks for
MORE_THAN_ONE = math.nextafter(1.0, math.inf)  # a draft that only equals what is free is not worth its training


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """What the artifact that is to be released says of itself."""

    sha256: str
    target: Mapping[str, str | None]  # the hashes of what it was made for, keyed as in `configs.schema.target.IDENTITY`


def read_artifact(folders: Sequence[str | Path]) -> Artifact:
    """Return what an artifact says of itself, or several that draft together."""
    # These import transformers, which a gate without an artifact need not wait for.
    from heads.frozen.identity import TargetIdentity
    from heads.metadata import agreed, hash_artifact, hash_together, locate_artifact, read_metadata

    hashes, made_for = [], []
    for folder in map(locate_artifact, folders):
        metadata = read_metadata(folder)
        hashes.append(hash_artifact(folder))
        made_for.append(TargetIdentity.from_dict(metadata.target, str(folder)).to_dict())
    return Artifact(sha256=hash_together(hashes), target={key: agreed(each[key] for each in made_for) for key in IDENTITY})


def judge(
    report: Report,
    config: GateConfig,
    baseline: Report | None = None,
    artifact: Artifact | None = None,
    served: ServedSection | None = None,
) -> GateVerdict:
    """Apply the checks that always hold, then every rule; `served` is what an engine said of the draft."""
    if baseline is not None:
        _check_baseline(report, baseline, config)
    findings = [_judge_lossless(report, config), _judge_prompts(report, config)]
    for name, suite in report.suites.items():
        asked = f"all {suite.prompts.num_asked} asked for"
        findings.append(_finding(f"prompts of {name}", float(suite.prompts.num_prompts), asked, _unfit(suite.prompts)))
    if report.prompts.num_trained_on is None and not config.allow_unknown_training:
        reason = "the draft does not say what it was trained on: allow_unknown_training takes it nevertheless"
        findings.append(_finding("training prompts", "unknown", "known", reason, "inconclusive"))
    findings.append(_judge_provenance(report, config, artifact))
    findings += _judge_served(report, config, served)
    findings += judge_rules(config)
    for rule in config.rules:
        findings += _judge_rule(report, rule, baseline)
    for name in config.must_beat:
        for suite_name, section in (by_suite(report) or {"": report}).items():
            findings += _judge_against_untrained(section, name, f" on {suite_name}" if suite_name else "")
    return GateVerdict(findings=tuple(findings))


def _check_baseline(report: Report, baseline: Report, config: GateConfig) -> None:
    """Refuse a baseline report that is incomplete, or differs in what touches the gate's rules."""
    relative = [rule for rule in config.rules if rule.relative_to_baseline]
    # A suite that one of the two lacks is refused with its rule.
    named = {rule.suite for rule in relative} & report.suites.keys() & baseline.suites.keys()
    further = [(report.suites[name].prompts, baseline.suites[name].prompts) for name in report.suites if name in named]
    for prompts in (baseline.prompts, *(theirs for _, theirs in further)):
        if reason := _unanswered(prompts):
            raise InputError(
                f"the baseline report is incomplete: {reason} ({prompts.source}); compare with one that answered every prompt"
            )
    of_a_machine = any(rule.metric.startswith("speed.") for rule in relative)
    found = [each for each in differences(report, baseline) if each.aspect != "machine" or of_a_machine]
    found += [each for pair in further for each in prompt_differences(*pair)]
    if found:
        raise InputError(
            f"the baseline report cannot be compared with, it differs in {'; '.join(map(str, found))}: measure both alike"
        )


# --- checks that always hold ----------------------------------------------------------------------------------------


def _finding(check: str, value: float | str, required: str, reason: str, otherwise: GateOutcome = "fail") -> Finding:
    return Finding(check=check, outcome=otherwise if reason else "pass", value=value, required=required, reason=reason)


def _judge_lossless(report: Report, config: GateConfig) -> Finding:
    section, reason = report.lossless, ""
    required = " or ".join(config.lossless) or "nothing (the gate allows no verdict)"
    if section.verdict == "inconclusive":
        checks = describe_checks(section, section.inconclusive_checks)
        lacking = f"the losslessness check needs more answers or samples than it got: {checks}"
        untested = f"{UNTESTED}: evaluate with that as it is by default"
        return _finding("lossless", section.verdict, required, lacking if checks else untested, "inconclusive")
    if section.verdict not in config.lossless:
        reason = f"{exactness(report)}; the gate does not allow this verdict"
    elif section.verdict != "lossy_by_design" and section.checked_prompts == 0:
        reason = "no answer was checked against plain decoding"
    elif section.verdict == "lossy_by_design" and report.quality is None:
        reason = "the rule changes answers, and nothing says what they are worth: evaluate with `quality` in the config"
    return _finding("lossless", section.verdict, required, reason)


def _judge_prompts(report: Report, config: GateConfig) -> Finding:
    prompts, wanted = report.prompts, config.suite_sha256
    reason = _unfit(prompts)
    if not reason and prompts.num_prompts < config.min_prompts:
        reason = f"the gate asks for at least {config.min_prompts} prompts (min_prompts)"
    if not reason and wanted is not None and prompts.sha256 != wanted:
        reason = f"the prompts, of {prompts.source}, hash to {short(prompts.sha256)}, not to the gate's suite_sha256"
    required = f"all {prompts.num_asked} asked for, at least {config.min_prompts}"
    required += "" if wanted is None else f", of suite {short(wanted)}"
    return _finding("prompts", float(prompts.num_prompts), required, reason)


def _unfit(prompts: PromptsSection) -> str:
    """Return why a draft cannot be judged by these prompts, or nothing."""
    seen = f"the draft was trained on {prompts.num_trained_on} of them: evaluate on prompts it has not seen"
    return _unanswered(prompts) or (seen if prompts.num_trained_on else "")


def _unanswered(prompts: PromptsSection) -> str:
    if prompts.failed:
        return f"{len(prompts.failed)} requests failed, the first on prompt {prompts.failed[0].prompt_id}"
    missing = prompts.num_asked - prompts.num_prompts
    return f"{missing} of the {prompts.num_asked} prompts asked for were not answered" if missing else ""


def _judge_provenance(report: Report, config: GateConfig, artifact: Artifact | None) -> Finding:
    """Check that the draft was made for the target it was measured with and, given the artifact, that it is this one."""
    draft, target = report.draft, report.target
    made_for = {"weights_sha256": draft.target_sha256} if artifact is None else artifact.target
    others = [IDENTITY[key] for key, digest in made_for.items() if digest != getattr(target, key)]
    reason = ""
    if artifact is not None and artifact.sha256 != draft.sha256:
        reason = f"the artifact hashes to {short(artifact.sha256)}, the draft measured to {short(draft.sha256)}: measure it"
    elif others and not config.allow_target_mismatch:
        reason = f"the draft was made for other {', '.join(others)} than it was measured with"
    required = "a draft made for this target" if artifact is None else "the artifact's hash, made for this target"
    return _finding("provenance", short(draft.sha256), required, reason)


def _judge_served(report: Report, config: GateConfig, served: ServedSection | None) -> list[Finding]:
    """Judge what an engine said of this draft: its answers, and its tokens per target step against the report's."""
    share = config.served_tau_ratio
    known = {report.draft.sha256, report.draft.measured_sha256}
    if served is None or served.draft_sha256 not in known or served.passed is None:
        reason = "" if share is None else "run draftsmith check on the export, and give its result by --check"
        reason += "" if not reason or served is None else f": {served.reason or 'the one at hand is of another draft'}"
        return [_finding("engine", "not checked in an engine", "a check of the export", reason, "inconclusive")]
    where = f"{served.engine} {served.version}"
    findings = [_finding("engine", where, "answers are the target's, drafts are accepted", served.reason or "")]
    change = served_change(report, served) if served.passed else None
    if change is not None:
        least = SERVED_SHARE if share is None else share
        required = f"{'not below' if share is None else 'at least'} {least:g} times the report's"
        found = _held(f"tokens_per_target_step in {served.engine}", change.ratio, required, least)
        is_enough = share is None and found.outcome == "inconclusive"
        findings.append(replace(found, outcome="pass", reason="") if is_enough else found)
    elif share is not None and served.passed:
        reason = "the engine and the report have other prompts, drafts a round or sampling: check and measure alike"
        findings.append(_finding(f"tokens_per_target_step in {served.engine}", "not compared", "", reason, "inconclusive"))
    return findings


# --- rules ----------------------------------------------------------------------------------------------------------


def judge_rules(config: GateConfig) -> list[Finding]:
    """Return that a gate cannot pass which asks for no least tau or speed; nothing for one that does."""
    if config.must_beat or any(rule.min is not None and WORTH.fullmatch(rule.metric) for rule in config.rules):
        return []
    reason = "no rule asks for a least tokens per target step or speed: the gate does not ask what the draft is worth"
    return [_finding("rules", float(len(config.rules)), "one on tau or speed", reason, "inconclusive")]


def _judge_rule(report: Report, rule: GateRule, baseline: Report | None) -> list[Finding]:
    """Return what the rule finds: one finding, or one for each category; `baseline` can be compared with the report."""
    section: SuiteSection = report
    path = ""
    if rule.suite is not None and rule.suite != report.prompts.suite:
        if rule.suite not in report.suites:
            known = ", ".join([report.prompts.suite, *report.suites])
            raise InputError(f"rules: the report has no suite {rule.suite!r} (it has: {known}); name it in eval's `suites`")
        section, path = report.suites[rule.suite], f"suites.{rule.suite}."
    metrics, own = [rule.metric], rule.metric.removeprefix(EVERY_CATEGORY)
    if own != rule.metric:
        metrics = [f"by_category.{category}.{own}" for category in section.by_category]
        if not metrics:
            return [_finding(f"{path}{rule.metric}", 0.0, "a category or more", "the report has none")]
    return [_judge_metric(report, f"{path}{metric}", rule, baseline) for metric in metrics]


def _judge_against_untrained(section: SuiteSection, name: str, where: str) -> list[Finding]:
    """Return whether the draft lies above a way of decoding that needs no training, on one suite."""
    fastest = fastest_free(section) if name == "fastest" else None
    known = section.baselines if name != "fastest" else {} if fastest is None else {name: fastest[1]}
    if name not in known:
        has = ", ".join(section.baselines) or "none"
        raise InputError(
            f"must_beat: the report has no baseline {name!r}{where} (it has: {has}); name it in eval's `baselines`"
        )
    ratios = {"tokens_per_target_step": "tokens_per_target_step_ratio", "decode_speedup": "decode_speed_ratio"}
    rival = name if fastest is None else f"{fastest[0]}, the fastest without training"
    found = {metric: known[name].interval_of(ratio) for metric, ratio in ratios.items()}
    required = "more than 1 times" + (" (prompts not independent)" if known[name].learns_from_prompts else "")
    return [
        _held(f"{metric} against {rival}{where}", Interval(point, *(bounds or ())), required, MORE_THAN_ONE)
        for metric, (point, bounds) in found.items()
        if fastest is None or metric == "decode_speedup"
    ]


def _judge_metric(report: Report, metric: str, rule: GateRule, baseline: Report | None) -> Finding:
    found = _look_up(report, metric, rule)
    required = f"at least {rule.min:g}" if rule.min is not None else f"at most {rule.max:g}"
    if rule.relative_to_baseline:
        required += " times the baseline"
    if rule.relative_to_baseline and found.point is not None:
        if baseline is None:
            raise InputError(f"rule on {metric} is relative to a baseline report; give one with --baseline previous.json")
        change = PAIRED[rule.metric](report, baseline, rule.suite if metric != rule.metric else None)
        if change is None:
            raise InputError(f"rules: {metric} cannot be relative to the baseline report, which did not time the same batches")
        found = change.ratio
    return _held(metric, found, required, rule.min, rule.max, by_point=rule.bound == "point")


def _held(
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
        outcome, reason = "inconclusive", "no interval: fewer than three prompts (or batches, for speed) were measured"
    elif (minimum is not None and low >= minimum) or (maximum is not None and high <= maximum):
        outcome, reason = "pass", ""
    elif (minimum is not None and high < minimum) or (maximum is not None and low > maximum):
        outcome, reason = "fail", "below the threshold" if minimum is not None else "above the threshold"
    else:
        outcome, reason = "inconclusive", "the interval holds the threshold: measure more prompts, or ask for less"
    shown = {} if by_point else {"low": low, "high": high}
    return Finding(check=check, outcome=outcome, value=found.point, required=required, reason=reason, **shown)


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


# --- a verdict and its renderings -----------------------------------------------------------------------------------


GateOutcome = Literal["pass", "fail", "inconclusive"]
SIGNS = {"pass": "✅ pass", "fail": "❌ fail", "inconclusive": "❔ inconclusive"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found; `low` and `high` only where an interval was judged."""

    check: str
    outcome: GateOutcome
    value: float | str | None
    low: float | None = None
    high: float | None = None
    required: str
    reason: str = ""  # why it did not pass


@dataclass(frozen=True, kw_only=True)
class GateVerdict:
    """All findings. Any failure fails the gate, else anything inconclusive makes it inconclusive."""

    findings: tuple[Finding, ...]

    @property
    def outcome(self) -> GateOutcome:
        """The worst outcome among the findings."""
        outcomes = {finding.outcome for finding in self.findings}
        return "fail" if "fail" in outcomes else "inconclusive" if "inconclusive" in outcomes else "pass"


def as_values(verdict: GateVerdict) -> dict[str, Any]:
    """Return the verdict as plain JSON values."""
    return {"outcome": verdict.outcome, "findings": [asdict(each) for each in verdict.findings]}


def findings_table(findings: Iterable[Finding]) -> Table:
    rows = [(each.outcome.upper(), each.check, measured(each), each.required, each.reason) for each in findings]
    return Table(title="Findings", header=("", "check", "measured", "required", "why not"), rows=rows)


def as_table(verdict: GateVerdict) -> str:
    """Return the verdict for a terminal: a line a check, the outcome last."""
    return f"{as_text(findings_table(verdict.findings))}\n\ngate: {verdict.outcome}"


def as_markdown(verdict: GateVerdict, report: Report) -> str:
    """Return the verdict for a pull request: outcome, headline of the report judged, a row a check."""
    blocks = [
        f"## {SIGNS[verdict.outcome]}: draft {code(report.draft.path)} ({escape(short(report.draft.sha256))})",
        escape(headline(report)),
        *(f"> **Warning:** {escape(warning)}" for warning in warnings(report)),
        as_markdown_table(findings_table(verdict.findings), numbers=False),
        f"Target {code(report.target.name)} ({escape(short(report.target.weights_sha256))}), {escape(settings(report))}.",
    ]
    return "\n\n".join(blocks) + "\n"


def measured(finding: Finding) -> str:
    """Return what a check found in a few characters, with the interval it was judged by."""
    if finding.value is None or isinstance(finding.value, str):
        return finding.value or "not measured"
    bounds = "" if finding.low is None else f" [{finding.low:.3f}, {finding.high:.3f}]"
    return f"{significant(finding.value, 4)}{bounds}"

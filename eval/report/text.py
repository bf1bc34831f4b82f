"""Numbers and verdicts of a report as text, the same on the page, in the Markdown summary and in a terminal. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval.report.schema import (
    ClosedSection,
    FailedRequest,
    LosslessSection,
    LosslessVerdict,
    OtherWaySection,
    Report,
    SuiteSection,
)

NOT_AVAILABLE = "–"
VERDICTS: dict[LosslessVerdict, str] = {
    "lossless": "Lossless",
    "lossless_up_to_ties": "Lossless up to ties",
    "not_lossless": "Not lossless",
    "lossy_by_design": "Lossy by design",
    "inconclusive": "Not decided",
}
UNTESTED = "no test of samples was run (lossless.first_token_samples was 0)"  # of a verdict without a check


def number(value: float | None, digits: int = 2) -> str:
    """Return a number with `digits` after the point, or a dash."""
    return NOT_AVAILABLE if value is None else f"{value:.{digits}f}"


def significant(value: float, digits: int) -> str:
    """Return a number rounded to so many significant digits, a large one in full instead of as a power of ten."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:.{digits}g}" if abs(rounded) < 10**digits else f"{rounded:.0f}"


def times(value: float | None, digits: int = 2) -> str:
    """Return a ratio as `1.42×`, or a dash."""
    return NOT_AVAILABLE if value is None else f"{value:.{digits}f}×"


def percent(value: float | None) -> str:
    """Return a share as `71 %`, or a dash."""
    return NOT_AVAILABLE if value is None else f"{100 * value:.0f} %"


def interval(bounds: Sequence[float] | None, digits: int = 2) -> str:
    """Return `[low, high]`, or nothing."""
    return "" if bounds is None else f"[{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]"


def cell(section: ClosedSection | None, name: str, form: Callable[[float | None, int], str] = number, digits: int = 2) -> str:
    """Return one of a section's numbers with the interval; a dash where there is none, an asterisk as of `learning_note`."""
    value, bounds = (None, None) if section is None else section.interval_of(name)
    mark = "*" if bounds is not None and getattr(section, "learns_from_prompts", False) else ""
    return f"{form(value, digits)} {interval(bounds, digits)}{mark}".rstrip()


def tau(section: ClosedSection | None) -> str:
    return cell(section, "tokens_per_target_step")


def speedup(section: ClosedSection | None) -> str:
    return cell(section, "decode_speedup", times)


def short(digest: str) -> str:
    return digest[:12]


def settings(report: Report) -> str:
    """Name the decoding settings and the number of prompts."""
    decode, prompts = report.decode, report.prompts
    lossy = f"lossy mode {decode.lossy['kind']}, " if decode.lossy else ""
    rule = f"verification {decode.verification}, " if decode.temperature > 0 and not lossy else ""
    return (
        f"{lossy}{decode.num_speculative_tokens} speculative tokens, {rule}temperature {decode.temperature:g}, "
        f"batch size {decode.batch_size}, {prompts.num_prompts} of {prompts.num_asked} prompts"
    )


def warnings(report: Report) -> list[str]:
    """Return what a reader must know before any number, worst first."""
    failed = len(failed_requests(report))
    return [*([f"{failed} request{'s' * (failed > 1)} failed."] if failed else []), *report.warnings]


def failed_requests(report: Report) -> list[FailedRequest]:
    """Return the requests of all suites whose decoding broke off."""
    return [each for section in (report, *report.suites.values()) for each in section.prompts.failed]


def headline(report: Report) -> str:
    """Say in one sentence how fast, how exact, and which way of decoding without training the draft does not beat."""
    said = f"{_speed_in_words(report)}{_untrained_rival(report)}"
    if not report.suites:
        return f"{said}; {exactness(report)}."
    others = (f"on {name} {times(speedup_of(each)[0])}{_untrained_rival(each)}" for name, each in report.suites.items())
    return f"On {report.prompts.suite} {said}; {'; '.join(others)}. On all suites together {exactness(report)}."


def by_suite(report: Report) -> dict[str, SuiteSection]:
    """Return what was measured on each suite by its name, the report itself for the first; nothing where there is one."""
    return {report.prompts.suite: report, **report.suites} if report.suites else {}


def speedup_of(section: SuiteSection) -> tuple[float | None, list[float] | None]:
    """Return the decode speedup and its interval; both None where nothing was timed."""
    return (None, None) if section.speed is None else section.speed.interval_of("decode_speedup")


def fastest_free(section: SuiteSection) -> tuple[str, OtherWaySection] | None:
    """Return the fastest way of decoding that needs no training, and its name."""
    ways = {name: each for name, each in section.baselines.items() if name != "autoregressive" and each.decode_speedup}
    return max(ways.items(), key=lambda way: way[1].decode_speedup or 0, default=None)


def faster_way(section: SuiteSection) -> str | None:
    """Return "draft" or the name of the way without training that is at least as fast; None where that was not measured."""
    name, way = fastest_free(section) or ("", None)
    if way is None or way.decode_speed_ratio is None:
        return None
    return "draft" if way.decode_speed_ratio > 1 else name


def what_to_serve(report: Report) -> str:
    """Say whether the draft or what needs no training is the faster one on the first suite; empty where not measured."""
    free, faster = fastest_free(report), faster_way(report)
    if free is None or faster is None:
        return ""
    name, ratio = free[0].replace("_", " "), cell(free[1], "decode_speed_ratio", times)
    note = f" {learning_note(report)}" if ratio.endswith("*") else ""
    if faster == "draft":
        return f"Serve the draft: it has {ratio} the speed of {name}, the fastest way that needs no training.{note}"
    return f"Serve {name}, which needs no training: the draft has {ratio} its speed.{note}"


def learning_note(report: Report) -> str:
    """Say what the asterisk at intervals of ways that learn from prompts means; empty where there are none."""
    sections = [report, *report.suites.values()]
    ways = [way for each in sections for way in (*each.baselines.values(), each.with_lookup) if way is not None]
    if not any(way.learns_from_prompts for way in ways):
        return ""
    note = (
        "* Suffix lookup learns from each answer for later prompts: they are not independent, and intervals may be too narrow."
    )
    processes = report.hardware.get("processes") or 1
    return note + (f" Each of {processes} processes learns from its own prompts alone." if processes > 1 else "")


def milliseconds_per_token(report: Report) -> str:
    """Say what a token takes, plainly and with the draft."""
    speed = report.speed
    if speed is None or speed.milliseconds_per_token_speculative is None:
        return ""
    plain, drafted = speed.milliseconds_per_token_autoregressive, speed.milliseconds_per_token_speculative
    return f"A token takes {plain:.1f} ms in plain decoding and {drafted:.1f} ms with the draft, at this batch size."


def exactness(report: Report) -> str:
    """Say what was found of the output: of greedy answers their tokens, of samples their distribution."""
    section = report.lossless
    if section.verdict == "lossy_by_design":
        return "the rule changes the target's distribution by design"
    if section.verdict == "inconclusive":
        grounds = describe_checks(section, section.inconclusive_checks) or UNTESTED
        return f"not decided whether the output is the target's: {grounds}"
    return _sampled_exactness(section) if report.decode.temperature > 0 else _greedy_exactness(section)


def _greedy_exactness(section: LosslessSection) -> str:
    if section.verdict == "not_lossless":
        found = [_greedy_mistakes(name, section.checks[name]) for name in section.failed_checks]
    else:
        found = [f"every one of {section.checked_tokens or 0:,} tokens is the target's choice within rounding"]
    differing = len(section.divergences)
    ties = ", first where two tokens nearly tie" if section.verdict == "lossless_up_to_ties" else ""
    found.append(
        f"{differing or 'none'} of {section.checked_prompts} answers differ{'s' * (differing < 2)} from plain decoding's"
    )
    return "; ".join(found) + ties


def _greedy_mistakes(name: str, check: Mapping[str, Any]) -> str:
    """Say what is wrong with the greedy answers of one mode, the draft's where the name has none."""
    counts = {"tokens are not the target's choice": "wrong_tokens", "answers end in the wrong place": "wrong_ends"}
    found = [f"{check[count]:,} {what}" for what, count in counts.items() if check.get(count)]
    if not found:
        found = [f"tokens lie further below the target's likeliest than plain decoding's (p = {check['p_value']:.2g})"]
    mode = name.removeprefix("greedy").removeprefix("_")
    return (f"in {mode.replace('_', ' ')}: " if mode else "") + ", ".join(found)


def _sampled_exactness(section: LosslessSection) -> str:
    if section.verdict == "not_lossless":
        return f"samples do not follow the target's distribution: {describe_checks(section, section.failed_checks)}"
    test = section.checks.get("first_tokens", {})
    grounds = f"first tokens of {test.get('num_samples', 0):,} samples, p = {test.get('p_value') or 0:.2g}"
    return f"no difference from the target's distribution found ({grounds})"


def lossless_detail(report: Report) -> str:
    """Say what the losslessness check found, and how small a mistake it would have found."""
    section, details = report.lossless, [exactness(report)]
    numbers = (section.largest_gap, section.largest_gap_in_roundings, section.tolerance, section.plain_largest_gap_in_roundings)
    if None not in numbers:
        gap, own, most, plain = (significant(each or 0.0, 2) for each in numbers)
        shares = [f"{100 * (each or 0.0):.1f} %" for each in (section.off_share, section.plain_off_share)]
        details.append(
            f"a token lies up to {gap} below the largest logit, {own} rounding errors of at most {most}, in plain decoding "
            f"{plain}; {shares[0]} of tokens are not the likeliest one, in plain decoding {shares[1]}"
        )
    if (least := section.checks.get("first_tokens", {}).get("detectable_difference")) is not None:
        details.append(f"a total variation of {significant(least, 2)} would show in four of five runs")
    return "; ".join(details)


def describe_checks(section: LosslessSection, names: Sequence[str]) -> str:
    """Name some of the losslessness checks, with the p-value of a test, or the reason why it has none or says nothing."""
    described = []
    for name in names:
        check = section.checks[name]
        p_value, reason = check.get("p_value"), check.get("reason")
        grounds = [] if p_value is None else [f"p = {p_value:.2g}"]
        grounds += [reason] if reason else []
        described.append((f"{name} ({', '.join(grounds)})" if grounds else name).replace("_", " "))
    return ", ".join(described)


def _untrained_rival(section: SuiteSection) -> str:
    """Name the fastest way of decoding in the same run that needs no training, unless the draft is significantly faster."""
    free = fastest_free(section)
    if free is None or free[1].decode_speed_ratio is None:
        return ""
    name, rival = free[0].replace("_", " "), free[1]
    bounds = rival.decode_speed_ratio_ci
    if bounds is not None and bounds[0] > 1:
        return ""
    if bounds is not None and bounds[1] < 1:
        return f", slower than {name}, which needs no training, at {times(rival.decode_speedup)}"
    return f", not significantly faster than {name}, which needs no training, at {times(rival.decode_speedup)}"


def _speed_in_words(report: Report) -> str:
    if report.speed is None or report.speed.decode_speedup is None:
        return f"{number(report.acceptance.tokens_per_target_step)} tokens per target step, speed not measured"
    bounds = report.speed.decode_speedup_ci
    forward = getattr(report.decode, "forward", None)  # of target and draft alike
    said = f"{speedup(report.speed)} the speed of plain decoding" + (f" by the {forward} forward" if forward else "")
    if bounds is None:
        return f"{said}, from one batch and so without an interval"
    if bounds[0] <= 1 <= bounds[1]:
        return f"{said} (not significant)"
    return f"{said} (slower)" if bounds[1] < 1 else said

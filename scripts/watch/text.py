"""What a run's page and its view in a terminal say in words. Texts from files are left as they are."""

from __future__ import annotations

from configs.runtime.command import GATE_FAILED, INCONCLUSIVE
from configs.runtime.terminal import clock, rate
from eval.report.text import NOT_AVAILABLE, number, percent, speedup_of, times
from scripts.watch.state import SILENT_SECONDS, Point, Progress, Run, Stage

# What a round misses falls as a power of the training answers: that of an EAGLE-3 head on SmolLM2, docs/results/curve.json
EXPONENT = 0.089
VERDICTS = {GATE_FAILED: "fail", INCONCLUSIVE: "inconclusive"}  # of stages that judge, by their codes


def headline(run: Run) -> str:
    """Say in one sentence where a run is, or what it came to."""
    stage = run.running or run.broken
    if run.state == "ended" and run.report is not None:
        verdict = "Measured" if run.gate is None else run.gate.outcome.capitalize()
        tau, speed = run.report.acceptance.tokens_per_target_step, speedup_of(run.report)[0]
        gained = "" if speed is None else f", {times(speed)} the speed of plain decoding"
        return f"{verdict}: {number(tau)} tokens per target step{gained}"
    match run.state:
        case "ended":
            return f"Ended after {_minutes_in_all(run)} minutes" if run.stages[1:] else f"{run.stages[0].name} has ended"
        case "failed" | "stopped" if stage is not None:
            code = "was stopped" if stage.code is None else f"ended with exit code {stage.code}"
            return f"{stage.name} {code}; the same command goes on"
        case "stopped":
            return "Not running; the same command goes on"
        case "silent" if stage is not None:
            return f"{stage.name}: {silence(run)}"
    if stage is None:
        return "Between two stages" if run.stages else "About to begin"
    return f"{stage.name}: {stage_progress(run)}"


def outlook(run: Run) -> str:
    """Say what twice the training answers would bring a head that drafts chains; nothing of other drafts or before the end."""
    report = run.report
    if run.state != "ended" or report is None or report.decode.tree is not None or report.draft.kind == "draft_lm":
        return ""
    if (tau := report.acceptance.tokens_per_target_step) is None:
        return ""
    missed = report.decode.num_speculative_tokens + 1 - tau
    gain = number(missed * (1 - 2**-EXPONENT))
    return (
        f"Twice the training answers would bring {gain} tokens per target step more, if they bring what they brought on SmolLM2"
    )


def stage_progress(run: Run) -> str:
    """Say how far the stage under way is."""
    if run.progress is not None:
        return progress(run.progress)
    steps = [point.step for point in (*run.losses, *run.taus)]
    return f"step {max(steps)}" if steps and run.running is not None and run.running.name == "train" else "under way"


def progress(found: Progress) -> str:
    """Say how far some work is: its share by tokens where these are counted."""
    left = "" if not found.seconds_left else f", {_clock(found.seconds_left)} left"
    paced = f", {rate(found.rate, found.rate_unit)}" if found.rate > 0 else ""
    return f"{found.description}, {found.done:,} of {found.total:,} {found.unit} ({percent(found.share)}){paced}{left}"


def silence(run: Run) -> str:
    """Say how long nothing was written, where that is long; nothing otherwise, or where the run is over."""
    if run.silent_seconds < SILENT_SECONDS or run.state not in ("running", "silent"):
        return ""
    minutes = run.silent_seconds / 60
    since = f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"
    if run.is_locked:
        return f"at work, but nothing was written for {since}"
    return f"no sign of life for {since}; where the run has died, the same command goes on"


def subtitle(run: Run) -> str:
    """Name the run."""
    target = "" if run.target is None else f"A draft for {run.target}, "
    return f"{target}in {run.folder}"


def state(stage: Stage) -> str:
    """Return a stage's state, with the verdict or the code that it ended with."""
    if stage.state == "done":
        return f"done: {VERDICTS[stage.code]}" if stage.code in VERDICTS else "done"
    return f"failed with {stage.code}" if stage.state == "failed" else stage.state


def minutes(value: float | None) -> str:
    return number(value, 1)


def time_left(run: Run) -> str:
    """Return the time left of the whole run, or a dash."""
    return NOT_AVAILABLE if run.seconds_left is None else _clock(run.seconds_left)


def at(point: Point | None) -> str:
    """Return a value and its step."""
    return NOT_AVAILABLE if point is None else f"{number(point.value)} at step {point.step:,}"


def failed_checks(run: Run) -> list[str]:
    """Return what the gate found wanting, a sentence each."""
    found = [] if run.gate is None else run.gate.findings
    return [f"{each.check}: {each.reason or each.outcome}" for each in found if each.outcome != "pass"]


def _clock(seconds: float) -> str:
    return clock(min(seconds, 1e8))  # years; a rate near nothing gives more than a date can hold


def _minutes_in_all(run: Run) -> str:
    return minutes(sum(stage.used_minutes or 0.0 for stage in run.stages))

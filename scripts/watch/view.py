"""A run in lines and a table, for a terminal, which nothing in its files can command."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from configs.runtime.command import GATE_FAILED, INCONCLUSIVE
from configs.runtime.terminal import clock, one_line, printable, rate
from eval.report.schema import AnswerSample
from eval.report.text import headline as report_headline
from eval.report.text import number, percent
from scripts.watch.reading import Point, Progress, Run, Stage

COLUMNS = 110  # of lines where there is no terminal
SHOWN_EVALUATIONS = 8
SHOWN_PIECES = 24  # of an answer
KINDS = {"accepted": "green", "target": "blue", "prefill": "underline"}  # of the pieces of an answer that are in its text
STYLES = {"waiting": "dim", "running": "bold cyan", "done": "green", "failed": "bold red", "stopped": "yellow"}
VERDICTS = {GATE_FAILED: "fail", INCONCLUSIVE: "inconclusive"}  # of stages that judge, by their codes
RESUME = "run the same command to resume"


def render(run: Run) -> RenderableType:
    """Return a run as lines and a table."""
    return Group(*_parts(run))


def _parts(run: Run) -> Iterator[RenderableType]:
    yield _line(headline(run), "bold")
    yield _line(("" if run.target is None else f"A draft for {run.target}, ") + f"in {run.folder}", "dim")
    if run.stages:
        yield _stages(run)
    if run.seconds_left is not None:
        yield _line(f"time left in all: {_clock(run.seconds_left)}")
    if run.losses:
        yield _line(f"loss: {_at(run.losses[-1])}, {_at(run.losses[0])}")
    if run.taus:
        values = " ".join(number(point.value) for point in run.taus[-SHOWN_EVALUATIONS:])
        yield _line(f"tau on held-out prompts: {values}; best {_at(run.best)}")
    if run.report is not None:
        yield _line(report_headline(run.report))
    for each in [] if run.gate is None else run.gate.findings:
        if each.outcome != "pass":
            yield _line(f"the gate: {each.check}: {each.reason or each.outcome}", "red")
    if run.check is not None:
        yield Text(printable(run.check.table()))
    if run.samples is not None and run.samples.samples:
        yield _answer(run.samples.samples[0])
    for what, path in run.links.items():
        yield Text.assemble(one_line(what), ": ", (one_line(str(run.folder / path)), "dim"))


def headline(run: Run) -> str:
    """Say in one sentence where a run is, or what it came to."""
    stage = run.running or run.broken
    match run.state:
        case "ended":
            minutes = number(sum(each.used_minutes or 0.0 for each in run.stages), 1)
            verdict = "" if run.gate is None else f"{run.gate.outcome.capitalize()}: "
            return f"{verdict}ended after {minutes} minutes" if run.stages[1:] else f"{run.stages[0].name} has ended"
        case "failed" | "stopped" if stage is not None:
            code = "was stopped" if stage.code is None else f"ended with exit code {stage.code}"
            return f"{stage.name} {code}; {RESUME}"
        case "stopped":
            return f"Not running; {RESUME}"
        case "silent" if stage is not None:
            minutes = number(run.silent_seconds / 60, 0)
            return f"{stage.name}: no sign of life for {minutes} minutes; where the run has died, {RESUME}"
    if stage is None:
        return "Between two stages" if run.stages else "About to begin"
    return f"{stage.name}: {_stage_progress(run, stage)}"


def _stage_progress(run: Run, stage: Stage) -> str:
    """Say how far the stage under way is."""
    if run.progress is not None:
        return _progress(run.progress)
    steps = [point.step for point in (*run.losses, *run.taus)]
    return f"step {max(steps)}" if steps and stage.name == "train" else "under way"


def _progress(found: Progress) -> str:
    """Say how far some work is."""
    left = "" if not found.seconds_left else f", {_clock(found.seconds_left)} left"
    paced = f", {rate(found.rate, found.unit)}" if found.rate > 0 else ""
    return f"{found.description}, {found.done:,} of {found.total:,} {found.unit} ({percent(found.share)}){paced}{left}"


def _stages(run: Run) -> Table:
    table = Table("stage", "state", box=None, pad_edge=False, header_style="dim")
    for name in ("planned, minutes", "used, minutes"):
        table.add_column(name, justify="right")
    for stage in run.stages:
        said: str = stage.state
        if stage.code and stage.state in ("done", "failed"):
            said += f": {VERDICTS.get(stage.code, stage.code)}"
        times = (number(each, 1) for each in (stage.planned_minutes, stage.used_minutes))
        table.add_row(_line(stage.name, STYLES[stage.state]), _line(said, STYLES[stage.state]), *times)
    return table


def _answer(sample: AnswerSample) -> Text:
    """Return the beginning of an answer, its pieces coloured by who wrote them; the key is in the same colours."""
    key = Text(", ").join(Text(kind, style) for kind, style in KINDS.items())
    line = Text.assemble("an answer (", key, "): ")
    for piece in [each for each in sample.pieces if each.kind in KINDS][:SHOWN_PIECES]:
        line.append(printable(re.sub(r"\s", " ", piece.text)), KINDS[piece.kind])
    return line


def _line(said: str, style: str = "") -> Text:
    return Text(one_line(said), style)


def _at(point: Point | None) -> str:
    return "-" if point is None else f"{number(point.value)} at step {point.step:,}"


def _clock(seconds: float) -> str:
    return clock(min(seconds, 1e8))  # years; a rate near nothing gives more than a date can hold

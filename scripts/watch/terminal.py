"""A run in a terminal: drawn anew every two seconds, or, where nobody looks on, a block of lines whenever something changed."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from configs.runtime.command import DONE
from configs.runtime.terminal import one_line, printable, show
from eval.report.schema import AnswerSample
from eval.report.text import headline, number
from scripts.watch import text
from scripts.watch.reading import read_run
from scripts.watch.state import Run

SECONDS_BETWEEN_LOOKS = 2.0
COLUMNS = 110  # of lines where there is no terminal
SHOWN_EVALUATIONS = 8
KINDS = {"accepted": "green", "target": "blue", "prefill": "underline"}  # of the pieces of an answer that are in its text
SHOWN_PIECES = 24  # of an answer
STYLES = {"waiting": "dim", "running": "bold cyan", "done": "green", "failed": "bold red", "stopped": "yellow"}


def watch(folder: Path, *, once: bool) -> int:
    """Show a run until it is over, or `once`; return the run's own code where it is over."""
    if once or not sys.stdout.isatty():
        return _print_changes(folder, once=once)
    run = read_run(folder)
    with Live(render(run), console=Console(), auto_refresh=False) as live:
        while not run.is_over:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            run = read_run(folder)
            live.update(render(run), refresh=True)
    return run.exit_code


def _print_changes(folder: Path, *, once: bool) -> int:
    console = Console(width=None if sys.stdout.isatty() else COLUMNS)
    shown = None
    while True:
        run = read_run(folder)
        if (key := _what_matters(run)) != shown:
            shown = key
            with console.capture() as captured:
                console.print(render(run))
            if not show(captured.get()):
                return DONE
        if once or run.is_over:
            return run.exit_code
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _what_matters(run: Run) -> tuple[object, ...]:
    """Return what is worth a block of lines when it changes; progress by tenths."""
    found = run.progress
    tenth = None if found is None else (found.description, int(10 * found.share))
    return run.state, tuple((each.name, each.state, each.code) for each in run.stages), run.taus, tenth


def render(run: Run) -> RenderableType:
    """Return a run as lines and a table; nothing in it can command the terminal."""
    return Group(*_parts(run))


def _parts(run: Run) -> Iterator[RenderableType]:
    yield _line(text.headline(run), "bold")
    yield _line(text.subtitle(run), "dim")
    if run.stages:
        yield _stages(run)
    if run.state == "running" and (silence := text.silence(run)):
        yield _line(silence, "yellow")
    if run.seconds_left is not None:
        yield _line(f"time left in all: {text.time_left(run)}")
    if run.losses:
        yield _line(f"loss: {text.at(run.losses[-1])}, {text.at(run.losses[0])}")
    if run.taus:
        values = " ".join(number(point.value) for point in run.taus[-SHOWN_EVALUATIONS:])
        yield _line(f"tau on held-out prompts: {values}; best {text.at(run.best)}")
    if run.report is not None:
        yield _line(headline(run.report))
    if outlook := text.outlook(run):
        yield _line(outlook, "dim")
    for check in text.failed_checks(run):
        yield _line(f"the gate: {check}", "red")
    if run.check is not None:
        yield Text(printable(run.check.table()))
    if run.samples is not None and run.samples.samples:
        yield _answer(run.samples.samples[0])
    for each in run.choices:
        if each.key != "minutes":  # which are in the table of the stages
            yield _line(f"{each.setting} ({each.reason})", "dim")
    for what, path in run.links.items():
        yield _line(f"{what}: {run.folder / path}", "dim")


def _line(said: str, style: str = "") -> Text:
    return Text(one_line(said), style)


def _answer(sample: AnswerSample) -> Text:
    """Return the beginning of an answer, its pieces coloured by who wrote them; the key is in the same colours."""
    key = Text(", ").join(Text(kind, style) for kind, style in KINDS.items())
    line = Text.assemble("an answer (", key, "): ")
    for piece in [each for each in sample.pieces if each.kind in KINDS][:SHOWN_PIECES]:
        line.append(printable(re.sub(r"\s", " ", piece.text)), KINDS[piece.kind])
    return line


def _stages(run: Run) -> Table:
    table = Table("stage", "state", box=None, pad_edge=False, header_style="dim")
    for name in ("planned, minutes", "used, minutes"):
        table.add_column(name, justify="right")
    for stage in run.stages:
        planned, used = text.minutes(stage.planned_minutes), text.minutes(stage.used_minutes)
        style = STYLES[stage.state]
        table.add_row(_line(stage.name, style), _line(text.state(stage), style), planned, used)
    return table

"""Look in on a run: `draftsmith watch RUN`, from this machine or another one on the same storage, while it goes on or later.

Shows the stages, the time left, loss, tau on held-out prompts and the best so far, and ends with the run, by its exit code.
RUN is the folder of `draftsmith run`, its draft.yaml, or the output of a training. Reads files alone and writes none. In a
terminal the view is drawn anew; elsewhere a block of lines comes whenever something changed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from configs.runtime.command import DONE, EPILOG, GATE_FAILED, INCONCLUSIVE, Parser, exit_code
from configs.runtime.terminal import clock, one_line, printable, rate, show
from eval.report.text import headline as report_headline
from eval.report.text import number, percent
from scripts.watch.reading import Point, Run, Stage, find_run, read_run

SECONDS_BETWEEN_LOOKS = 2.0
COLUMNS = 110  # of lines where there is no terminal
SHOWN_EVALUATIONS = 8
STYLES = {"waiting": "dim", "running": "bold cyan", "done": "green", "failed": "bold red", "stopped": "yellow"}
VERDICTS = {GATE_FAILED: "fail", INCONCLUSIVE: "inconclusive"}  # of stages that judge, by their codes
RESULTS = ("eval/report.html", "eval/gate.md", "export/*/serve.txt")
RESUME = "run the same command to resume"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0], epilog=EPILOG)
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its draft.yaml")
    parser.add_argument("--once", action="store_true", help="show it as it is now, and end")

    def run() -> int:
        arguments = parser.parse_args(argv)
        folder = find_run(arguments.run)
        return _print_changes(folder, once=arguments.once) if arguments.once or not sys.stdout.isatty() else _draw(folder)

    return exit_code(run)


def _draw(folder: Path) -> int:
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
    tenth = run.progress and (run.progress.description, int(10 * run.progress.share))
    return run.state, [(each.name, each.state, each.code) for each in run.stages], run.taus, tenth


# --- what is shown, in which nothing of the files can command the terminal ------------------------------------------


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
        best = max(run.taus, key=lambda point: point.value)  # the first of them, which is the draft that is kept
        yield _line(f"tau on held-out prompts: {values}; best {_at(best)}")
    if run.report is not None:
        yield _line(report_headline(run.report))
    for each in run.gate.get("findings", ()):
        if each["outcome"] != "pass":
            yield _line(f"the gate: {each['check']}: {each['reason'] or each['outcome']}", "red")
    if run.check is not None:
        yield Text(printable(run.check.table()))
    for path in (path for pattern in RESULTS for path in sorted(run.folder.glob(pattern))):
        yield _line(str(path), "dim")


def headline(run: Run) -> str:
    """Say in one sentence where a run is, or what it came to."""
    stage = run.current
    match run.state:
        case "ended":
            minutes = number(sum(each.used_minutes or 0.0 for each in run.stages), 1)
            verdict = f"{run.gate['outcome'].capitalize()}: " if run.gate else ""
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
    return f"{stage.name}: {_progress(run, stage)}"


def _progress(run: Run, stage: Stage) -> str:
    """Say how far the stage under way is."""
    if (found := run.progress) is None:
        steps = [point.step for point in (*run.losses, *run.taus)]
        return f"step {max(steps)}" if steps and stage.name == "train" else "under way"
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


def _line(said: str, style: str = "") -> Text:
    return Text(one_line(said), style)


def _at(point: Point) -> str:
    return f"{number(point.value)} at step {point.step:,}"


def _clock(seconds: float) -> str:
    return clock(min(seconds, 1e8))  # years; a rate near nothing gives more than a date can hold


if __name__ == "__main__":
    sys.exit(main())

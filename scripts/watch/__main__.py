"""Look in on a run: `draftsmith watch RUN`, from this machine or another one on the same storage, while it goes on or later.

Shows the stages, the time left, loss, tau on held-out prompts and the best so far, and ends with the run, by its exit code.
RUN is the folder of `draftsmith run`, its draft.yaml, or the output of a training. Reads files alone and writes none. A block
of lines comes whenever something changed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from configs.runtime.command import DONE, EPILOG, GATE_FAILED, INCONCLUSIVE, Parser, exit_code
from configs.runtime.terminal import clock, one_line, printable, rate, show
from eval.report.text import headline as report_headline
from eval.report.text import number, percent
from scripts.watch.reading import Point, Run, Stage, find_run, read_run

SECONDS_BETWEEN_LOOKS = 2.0
SHOWN_EVALUATIONS = 8
VERDICTS = {GATE_FAILED: "fail", INCONCLUSIVE: "inconclusive"}  # of stages that judge, by their codes
RESULTS = ("eval/report.html", "eval/gate.md", "export/**/serve.txt")
RESUME = "run the same command to resume"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0], epilog=EPILOG)
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its draft.yaml")
    parser.add_argument("--once", action="store_true", help="show it as it is now, and end")

    def run() -> int:
        arguments = parser.parse_args(argv)
        return follow(find_run(arguments.run), once=arguments.once)

    return exit_code(run)


def follow(folder: Path, *, once: bool) -> int:
    """Show a run whenever something changed, until it is over; return its exit code so far."""
    shown = None
    while True:
        run = read_run(folder)
        if (key := _what_matters(run)) != shown:
            shown = key
            if not show(render(run)):
                return DONE
        if once or run.is_over:
            return run.exit_code
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _what_matters(run: Run) -> tuple[object, ...]:
    """Return what is worth a block of lines when it changes; progress by tenths."""
    tenth = run.progress and (run.progress.description, int(10 * run.progress.share))
    return run.state, [(each.name, each.state, each.code) for each in run.stages], run.taus, tenth


# --- what is shown, in which nothing of the files can command the terminal ------------------------------------------


def render(run: Run) -> str:
    """Return a run as lines."""
    return printable("\n".join(_lines(run)) + "\n")


def _lines(run: Run) -> Iterator[str]:
    yield one_line(headline(run))
    yield one_line(("" if run.target is None else f"A draft for {run.target}, ") + f"in {run.folder}")
    if run.stages:
        yield from _stages(run)
    if run.seconds_left is not None:
        yield f"time left in all: {_clock(run.seconds_left)}"
    if run.losses:
        yield f"loss: {_at(run.losses[-1])}, {_at(run.losses[0])}"
    if run.taus:
        values = " ".join(number(point.value) for point in run.taus[-SHOWN_EVALUATIONS:])
        best = max(run.taus, key=lambda point: point.value)  # the first of them, which is the draft that is kept
        yield f"tau on held-out prompts: {values}; best {_at(best)}"
    if run.report is not None:
        yield one_line(report_headline(run.report))
    for each in run.gate.get("findings", ()):
        if each["outcome"] != "pass":
            yield one_line(f"the gate: {each['check']}: {each['reason'] or each['outcome']}")
    if run.check is not None:
        yield run.check.table()
    yield from (str(path) for pattern in RESULTS for path in sorted(run.folder.glob(pattern)))


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


def _stages(run: Run) -> Iterator[str]:
    """Yield a line for each stage, with planned and used minutes."""
    row = "{:12}  {:20}  {:>16}  {:>13}".format
    yield row("stage", "state", "planned, minutes", "used, minutes")
    for stage in run.stages:
        said: str = stage.state
        if stage.code and stage.state in ("done", "failed"):
            said += f": {VERDICTS.get(stage.code, stage.code)}"
        yield row(one_line(stage.name), said, *(number(each, 1) for each in (stage.planned_minutes, stage.used_minutes)))


def _at(point: Point) -> str:
    return f"{number(point.value)} at step {point.step:,}"


def _clock(seconds: float) -> str:
    return clock(min(seconds, 1e8))  # years; a rate near nothing gives more than a date can hold


if __name__ == "__main__":
    sys.exit(main())

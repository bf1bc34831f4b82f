"""Look in on a run: `draftsmith watch RUN`, from this machine or another one on the same storage, while it goes on or later.

Shows the stages, the time left, loss, tau on held-out prompts and the best so far, and ends with the run, by its exit code.
RUN is the folder of `draftsmith run`, its draft.yaml, or the output of a training. Reads files alone and writes none. In a
terminal the view is drawn anew; elsewhere a block of lines comes whenever something changed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from configs.runtime.command import DONE, EPILOG, Parser, exit_code
from configs.runtime.terminal import show
from scripts.watch.reading import Run, find_run, read_run
from scripts.watch.view import COLUMNS, render

SECONDS_BETWEEN_LOOKS = 2.0


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
    found = run.progress
    tenth = None if found is None else (found.description, int(10 * found.share))
    return run.state, tuple((each.name, each.state, each.code) for each in run.stages), run.taus, tenth


if __name__ == "__main__":
    sys.exit(main())

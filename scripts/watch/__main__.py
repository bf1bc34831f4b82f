"""Look in on a run: `draftsmith watch RUN`, from this machine or another one on the same storage, while it goes on or later.

Shows the stages, the time left, loss, tau on held-out prompts and the best so far, and ends with the run, by its exit code.
RUN is the folder of `draftsmith run`, its draft.yaml, or the output of a training. Reads files alone and writes none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from configs.runtime.command import EPILOG, Parser, exit_code
from scripts.watch.reading import find_run
from scripts.watch.terminal import watch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0], epilog=EPILOG)
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its draft.yaml")
    parser.add_argument("--once", action="store_true", help="show it as it is now, and end")

    def run() -> int:
        arguments = parser.parse_args(argv)
        return watch(find_run(arguments.run), once=arguments.once)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())

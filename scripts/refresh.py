"""Train the served draft on with its traffic, and judge the result: `python scripts/refresh.py --config FILE`.

The log of served conversations becomes prompts without secrets and duplicates, which the target answers; the served draft is
trained on with them and a share of its old data; both drafts are measured on held-out traffic and on the old suite, compared
prompt by prompt, and the gate says whether the new one may replace the other. Rerun the same command to resume. It ends
with the gate's code. With `--drift` nothing is trained: tau of the served draft by week of the log. docs/releasing.md walks it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from configs.runtime.files import folder_lock
from configs.schema.commands.refreshing import RefreshConfig


def main(config: RefreshConfig, args: argparse.Namespace) -> int:
    """Refresh the draft, or measure the drift; return the exit code."""
    # torch and transformers take seconds to import: a mistyped key is reported before that.
    from scripts.refresh_steps.run import drift, refresh
    from scripts.run.steps import stop

    signal.signal(signal.SIGTERM, stop)
    with folder_lock(Path(config.output)):
        return drift(config) if args.drift else refresh(config)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("--drift", action="store_true", help="train nothing: tau of the served draft by week of the log")


if __name__ == "__main__":
    description = "Train the served draft on with its traffic, and judge the result against it."
    sys.exit(run_command(RefreshConfig, main, description=description, add_arguments=add_arguments))

"""Print and draw the metrics of a training run: `python scripts/show_training.py runs/distill`.

Prints a few lines for the whole run and draws all steps into RUN/metrics.svg.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from configs.schema.base import Settings


def main(config: Settings, args: argparse.Namespace) -> None:
    """Read, print, draw."""
    from configs.runtime.files import write_text
    from train.telemetry.files import METRICS_FILE, read_metrics
    from train.telemetry.view import as_table, draw_metrics

    run = Path(args.run)
    rows = read_metrics(run / METRICS_FILE)
    print(as_table(rows))
    write_text(run / "metrics.svg", draw_metrics(rows))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own argument."""
    parser.add_argument("run", metavar="RUN", help="output folder of train/distill.py or train/heads.py")


if __name__ == "__main__":
    description = "Print and draw the metrics of a training run."
    sys.exit(run_command(Settings, main, description=description, add_arguments=add_arguments))

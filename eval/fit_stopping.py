"""Fit a rule for when to stop drafting to a report: `python eval/fit_stopping.py REPORT --out FILE`.

Prints the settings; with `--out`, writes them as `decode.stopping` of a YAML file for `eval/run.py --config`. Compare before
and after by `eval/compare.py`, or with the report as the gate's baseline.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.startup import guard_imports

    guard_imports()

import yaml

from configs.runtime.command import run_command
from configs.runtime.files import write_text
from configs.schema.base import Settings


def main(config: Settings, args: argparse.Namespace) -> None:
    """Read, fit, print, write."""
    # torch takes seconds to import: a mistyped argument is reported before that.
    from eval.cost.draft_length import stopping_from_report
    from eval.report.schema import load_report

    stopping = stopping_from_report(load_report(Path(args.report)))
    text = yaml.safe_dump({"decode": {"stopping": stopping.model_dump(mode="json", exclude_none=True)}}, sort_keys=False)
    print(text, end="")
    if args.out is not None:
        write_text(Path(args.out), text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("report", metavar="REPORT", help="report.json of a chain drafted to a fixed length, batch size 1")
    parser.add_argument("--out", metavar="FILE", help="YAML file to write")


if __name__ == "__main__":
    description = "Fit a cost rule for when to stop drafting to a report."
    sys.exit(run_command(Settings, main, description=description, add_arguments=add_arguments))

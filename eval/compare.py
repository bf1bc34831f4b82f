"""Set reports side by side: `python eval/compare.py runs/a/report.json runs/b/report.json [...]`.

Prints a table that compares the others with the first, and writes it as Markdown (`--set output=FILE`). A folder stands for
the `report.json` in it. Below the table stands what each report differs in; of other targets or prompts no number is compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.runtime.errors import guard_imports

    guard_imports()

from configs.runtime.command import DONE, run_command
from configs.runtime.errors import InputError
from configs.runtime.files import write_text
from configs.runtime.terminal import say
from configs.schema.evaluation import CompareConfig
from eval.report.comparison import as_markdown, compare, notes, overview
from eval.report.schema import load_report, report_file
from eval.report.tables import as_text


def main(config: CompareConfig, args: argparse.Namespace) -> int:
    paths = [report_file(path) for path in args.reports]
    output = Path(config.output)
    if output.resolve() in [path.resolve() for path in paths]:
        raise InputError(f"output: the table would overwrite the report {output}; give another file")
    entries = compare([(str(path), load_report(path)) for path in paths])
    write_text(output, as_markdown(entries))
    say("\n".join([as_text(overview(entries)), *notes(entries), f"\nwritten: {output}"]))
    return DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", metavar="REPORT", nargs="+", help="report.json, or the folder that eval/run.py wrote it to")


if __name__ == "__main__":
    sys.exit(run_command(CompareConfig, main, description="Set reports side by side.", add_arguments=add_arguments))

"""Ask a report's cost model about other settings: `python eval/predict.py REPORT [--bandwidth GB/s --flops TFLOP/s]`.

Prints the expected decode speedup by batch size and number of drafts. With a bandwidth and a speed of matrix products (in the
dtype of the report) it answers for a machine that has those, by the roofline; without, for the report's own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import DONE, run_command
from configs.runtime.errors import InputError
from configs.schema.evaluation import PredictConfig
from eval.report.markdown import table
from eval.report.schema import load_report, report_file
from eval.report.text import times


def main(config: PredictConfig, args: argparse.Namespace) -> int:
    """Read, predict, print. What needs torch is imported late, so that a mistake is reported at once."""
    report = load_report(report_file(args.report))
    bandwidth, flops = _scaled("--bandwidth", args.bandwidth, 1e9), _scaled("--flops", args.flops, 1e12)
    from eval.cost.predict import prediction_in, prediction_of

    model = prediction_of(report, args.report, bytes_per_second=bandwidth, flops_per_second=flops)
    context = config.context_tokens or prediction_in(report, args.report).context_tokens
    drafts = range(1, model.longest + 1)
    rows = []
    for batch in config.batch_sizes:
        fastest, speedup = model.best(batch, context)
        speedups = [times(model.speedup(each, batch, context)) for each in drafts]
        rows.append((str(batch), *speedups, str(fastest) if speedup > 1 else "none"))
    print(table(("batch", *(f"{each} draft{'s' * (each > 1)}" for each in drafts), "fastest"), rows))
    largest = model.break_even_batch(context)
    up_to = "every batch that was looked at" if largest is None else f"a batch of {largest}"
    print(f"\nAt {context} tokens of context drafting pays {'at no batch' if largest == 0 else f'up to {up_to}'}.")
    return DONE


def _scaled(name: str, value: float | None, unit: float) -> float | None:
    if value is not None and not value > 0:
        raise InputError(f"{name} must be above 0, got {value:g}")
    return None if value is None else value * unit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("report", metavar="REPORT", help="report.json, or its folder, of an evaluation with `cost` set")
    parser.add_argument("--bandwidth", metavar="GB/s", type=float, help="memory bandwidth of another machine")
    parser.add_argument("--flops", metavar="TFLOP/s", type=float, help="its matrix products in the report's dtype")


if __name__ == "__main__":
    sys.exit(run_command(PredictConfig, main, description="Ask a report's cost model.", add_arguments=add_arguments))

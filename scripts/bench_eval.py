"""Measure the evaluator: predicted speed against measured, and its own cost, into docs/results/eval.json.

    make bench-eval

On the embedded target with the demo's draft (run `make demo` first), about eight minutes on two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from configs.runtime.command import run_command
from configs.schema.benchmarks import BenchEvalConfig


def main(config: BenchEvalConfig) -> int:
    """Run the benchmark. What needs torch is imported here, so that a typo in the config is reported at once."""
    from scripts.bench.evaluation.benchmark import compare_predictions

    return compare_predictions(config)


if __name__ == "__main__":
    sys.exit(run_command(BenchEvalConfig, main, description="Measure predictions against decoding, and the evaluator's cost."))

"""Measure the evaluator: predicted speed against measured, and its own cost, into docs/results/eval.json.

    make bench-eval

On the embedded target with the demo's draft (run `make demo` first), about eight minutes on two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run as a script, Python puts scripts/ first on the path; the project's packages lie one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.benchmarks import BenchEvalConfig
from configs.command import run_command


def main(config: BenchEvalConfig) -> int:
    """Run the benchmark. What needs torch is imported here, so that a typo in the config is reported at once."""
    from scripts.prediction_comparison import compare_predictions

    return compare_predictions(config)


if __name__ == "__main__":
    sys.exit(run_command(BenchEvalConfig, main, description="Measure predictions against decoding, and the evaluator's cost."))

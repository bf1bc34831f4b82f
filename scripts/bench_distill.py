"""Measure the distillation beside plain ways of doing it, and beside TRL's, into docs/results/distill.json.

    make bench-distill

runs `make sweep` first, whose rows join the file, and then this script. On the demo's draft, target and data (run `make demo`
first), about eight minutes after the sweep on two quiet cores of a Linux machine, the only system that says how much memory a
process took at its peak. The loss in one piece needs 21 GiB of free memory at the 4096 positions asked for; with less, fewer
positions are measured, and the rows say how many. For the comparison with TRL, which is no dependency of this project, first
`.venv/bin/pip install trl==1.16.0`; that adds about fifteen minutes. Ends with 1 where two sides that are to compute the same
loss do not.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run as a script, Python puts scripts/ first on the path; the project's packages lie one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.benchmarks import BenchDistillConfig
from configs.command import run_command


def main(config: BenchDistillConfig) -> int:
    """Run the benchmark. What needs torch is imported here, so that a typo in the config is reported at once."""
    from scripts.distill_comparison import compare_distillation

    return compare_distillation(config)


if __name__ == "__main__":
    sys.exit(run_command(BenchDistillConfig, main, description="Measure the distillation's speed, memory and yield."))

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

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from configs.runtime.command import run_command
from configs.schema.benchmarks import BenchDistillConfig


def main(config: BenchDistillConfig) -> int:
    """Run the benchmark. What needs torch is imported here, so that a typo in the config is reported at once."""
    from scripts.bench.distill.benchmark import compare_distillation

    return compare_distillation(config)


if __name__ == "__main__":
    sys.exit(run_command(BenchDistillConfig, main, description="Measure the distillation's speed, memory and yield."))

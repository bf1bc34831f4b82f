"""Measure two processes beside one, padding, checkpoints and waiting for data, into docs/results/scale.json.

    make bench-scale

On the recipe, data and cache of `make bench-heads`, which makes them. Fifteen runs of half a minute in turns, five of
one process, five of two with one thread each, and five of two that share one's batch; the machine must have two cores that
nothing else uses. The rows are those of `scripts/bench/scale/engines.py`. The file also says how far `scripts/plan.py` was from
what was measured. Linux only: memory is read from /proc.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from configs.runtime.command import run_command
from configs.schema.benchmarks import BenchScaleConfig


def main(config: BenchScaleConfig) -> int:
    """Run the benchmark. What needs torch is imported here, so that a typo in the config is reported at once."""
    from scripts.bench.scale.benchmark import compare_scale

    return compare_scale(config)


if __name__ == "__main__":
    sys.exit(run_command(BenchScaleConfig, main, description="Measure training in several processes, and what it waits for."))

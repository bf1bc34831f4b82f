"""Time optimiser steps in one of the processes that `scripts/bench_scale.py` starts; by hand:

python -m torch.distributed.run --nproc_per_node 2 scripts/bench/scale/child.py --config steps.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from configs.runtime.command import run_command
from configs.schema.benchmarks import ScaleStepsConfig


def main(config: ScaleStepsConfig) -> None:
    """Take the steps. What needs torch is imported here, so that a typo in the config is reported at once."""
    from scripts.bench.scale.steps import measure_steps

    measure_steps(config)


if __name__ == "__main__":
    sys.exit(run_command(ScaleStepsConfig, main, description="Time optimiser steps of a recipe in one of several processes."))

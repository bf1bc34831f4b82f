"""Time optimiser steps in one of the processes that `scripts/bench_scale.py` starts; by hand:

python -m torch.distributed.run --nproc_per_node 2 scripts/scale_child.py --config steps.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run as a script, Python puts scripts/ first on the path; the project's packages lie one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.command import run_command
from configs.scale import ScaleStepsConfig


def main(config: ScaleStepsConfig) -> None:
    """Take the steps. What needs torch is imported here, so that a typo in the config is reported at once."""
    from scripts.scale_steps import measure_steps

    measure_steps(config)


if __name__ == "__main__":
    sys.exit(run_command(ScaleStepsConfig, main, description="Time optimiser steps of a recipe in one of several processes."))

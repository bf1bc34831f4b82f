"""Choose a distillation recipe: train small runs over divergences and data policies, and compare their tau in one table.

    make sweep

or by a config of its own. Every cell is trained in its own process from the same seed
and order of data, then decodes the same held-out prompts. Writes OUTPUT/sweep.json and prints its table and the recipe to take.
Started again, it trains only cells that are not finished or whose config or data have changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from scripts.lab.recipe_sweep.settings import SweepConfig


def main(config: SweepConfig) -> None:
    """Run the sweep. What needs torch is imported here, so that a typo in the config is reported at once."""
    from scripts.lab.recipe_sweep.run import run_sweep

    run_sweep(config)


if __name__ == "__main__":
    sys.exit(run_command(SweepConfig, main, description="Train small runs over divergences and data policies, and choose."))

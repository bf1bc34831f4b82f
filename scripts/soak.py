"""Kill, stop and damage tiny runs at random moments and let them go on, into docs/results/soak.json.

    make soak

Each round starts a run of a second or two on a tiny random target (distillation, a head, data or a cache), ends it as its
fault says, starts it again, and compares what it ends with, byte for byte, with a run that nothing disturbed. 210 rounds take
about fifteen minutes on two cores. Ends with 1 where bytes differ, or more steps are done twice than lie between two
checkpoints. Linux only: the runs are forked, so that each begins at once.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run as a script, Python puts scripts/ first on the path; the project's packages lie one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.benchmarks import SoakConfig
from configs.command import run_command


def main(config: SoakConfig) -> int:
    """Run the soak. What needs torch is imported here, so that a typo in the config is reported at once."""
    from scripts.soak_rounds import soak

    return soak(config)


if __name__ == "__main__":
    sys.exit(run_command(SoakConfig, main, description="Kill and resume tiny runs, and compare what they end with."))

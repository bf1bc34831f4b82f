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

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from configs.runtime.command import run_command
from configs.schema.benchmarks import SoakConfig


def main(config: SoakConfig) -> int:
    """Run the soak. What needs torch is imported here, so that a typo in the config is reported at once."""
    from scripts.fault_injection.rounds import soak

    return soak(config)


if __name__ == "__main__":
    sys.exit(run_command(SoakConfig, main, description="Kill and resume tiny runs, and compare what they end with."))

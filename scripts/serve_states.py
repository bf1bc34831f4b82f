"""Print the line that starts a server of hidden states: `python scripts/serve_states.py --config configs/heads/eagle3.yaml`.

The recipe is one of `train/heads.py` or `train/distill.py` with a section `target.states`; a target cache for it takes the
same servers. One line for each port in `target.states.urls`, for a shell with vLLM, which may add options of its own:

    eval "$(python scripts/serve_states.py --config configs/heads/eagle3.yaml) --tensor-parallel-size 8"

`--cpu` is for vLLM on a CPU. Of the target nothing but the config is read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from configs.schema.commands.planning import PlanConfig
from scripts.plan import schema_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a line takes beside a config."""
    parser.add_argument("--cpu", action="store_true", help="for vLLM on a CPU, with the connector in scripts/engine_states")


def main(config: PlanConfig, arguments: argparse.Namespace) -> None:
    """Print the lines."""
    from scripts.engine_states.line import serve_lines

    print("\n".join(serve_lines(config, cpu=arguments.cpu)))


if __name__ == "__main__":
    sys.exit(
        run_command(
            schema_of(sys.argv[1:]),
            main,
            description="Print the line that starts a server of hidden states for a recipe.",
            add_arguments=add_arguments,
        )
    )

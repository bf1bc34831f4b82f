"""Print the lines that start servers of hidden states, for a shell with vLLM.

    eval "$(python scripts/serve_states.py --config configs/heads/eagle3.yaml \\
        --set 'target.states.urls=[http://localhost:8000/v1]' target.states.path=runs/states -- --tensor-parallel-size 8)"

The recipe is one of `train/heads.py` or `train/distill.py`; a target cache for it takes the same servers. There is one line for
each port in `target.states.urls`, all but the last in the background; what stands after `--` is added to each. Where the urls
are this machine's, servers listen on 127.0.0.1 alone. Otherwise they listen on every interface and ask for the key in the
variable that `target.states.api_key_variable` names. `--cpu` is for vLLM on a CPU. Of the target only the config is read.
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
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="of vllm serve, added to each line")


def main(config: PlanConfig, arguments: argparse.Namespace) -> None:
    """Print the lines."""
    from scripts.engine_states.line import serve_lines

    print("\n".join(serve_lines(config, cpu=arguments.cpu, options=arguments.options)))


if __name__ == "__main__":
    sys.exit(
        run_command(
            schema_of(sys.argv[1:]),
            main,
            description="Print the line that starts a server of hidden states for a recipe.",
            add_arguments=add_arguments,
        )
    )

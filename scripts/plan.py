"""Plan a training recipe before it is run: `draftsmith plan --config configs/heads/eagle3.yaml`.

    draftsmith plan --config configs/heads/eagle3.yaml --set target.name=meta-llama/Llama-3.1-8B-Instruct \\
        --set hardware.preset=h100_80gb hardware.num_accelerators=8

Reads a recipe of `train/heads.py` or `train/distill.py` as it stands, and of the target nothing but its config. Prints memory
by part, which of configs/accelerate fits and why the simpler ones do not, disk, and the line that starts the run.
The sections `hardware` and `workload` (configs/schema/commands/planning.py) come on top, by --set or in the file. A recipe with
a section `head` is one of heads, any other of distillation. Where `data.train` does not exist yet, `workload` says how much
there will be. How far plans were from measured runs is in docs/scaling.md. Writes nothing but the data file's index, beside it.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from configs.runtime.command import run_command
from configs.runtime.errors import InputError
from configs.runtime.loading import read_values
from configs.schema.commands.planning import PlanConfig, PlanDistillConfig, PlanHeadsConfig
from configs.schema.training import HeadsConfig, training_schema

PLANNED = {"hardware", "workload"}


def main(config: PlanConfig, arguments: argparse.Namespace) -> None:
    """Print the plan."""
    from train.plan.page import plan_page

    print(plan_page(config, training_options(arguments)))


def training_options(arguments: argparse.Namespace) -> str:
    """Return the options by which training is given this recipe, which may not have a plan's own sections there."""
    path = arguments.config
    if path is not None and read_values(path).keys() & PLANNED:
        path = "mine.yaml"  # the recipe without them
    changes = [each for each in arguments.overrides if each.partition("=")[0].partition(".")[0] not in PLANNED]
    options = [*([] if path is None else ["--config", path]), *(["--set", *changes] if changes else [])]
    return shlex.join(options)


def schema_of(argv: list[str]) -> type[PlanHeadsConfig] | type[PlanDistillConfig]:
    """Return which kind of recipe a command line names; of a file that cannot be read the command itself complains."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        config = parser.parse_known_args(argv)[0].config
        is_heads = config is None or training_schema(config) is HeadsConfig
    except (argparse.ArgumentError, InputError):
        is_heads = True
    return PlanHeadsConfig if is_heads else PlanDistillConfig


if __name__ == "__main__":
    description = "Plan a training recipe's memory and disk."
    sys.exit(run_command(schema_of(sys.argv[1:]), main, description=description, add_arguments=lambda parser: None))

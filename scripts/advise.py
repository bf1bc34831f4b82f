"""Say which draft to train, by measurement: `python scripts/advise.py TARGET --prompts FILE --budget 30m`.

The target answers prompts of the file; small trials over families, sizes and draft vocabularies are trained on the answers by
successive halving; of each, tau by position and the cost of a draft are measured, and the cost model predicts its speed. Writes
advice.md, advice.json and recipe.yaml, the recipe of the whole training. Rerun the same command to resume. docs/advice.md walks
it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import minutes, run_command
from configs.runtime.errors import InputError
from configs.runtime.files import folder_lock
from configs.schema.commands.advising import AdviceConfig


def main(config: AdviceConfig, args: argparse.Namespace) -> int:
    """Advise; return the exit code."""
    if (args.prompts is None) == (config.data is None):
        raise InputError("give either --prompts, a file of what the target will be asked, or data, a folder of its answers")
    update: dict[str, object] = {"target": config.target.model_copy(update={"name": args.target})}
    if args.prompts is not None:
        update["prompts"] = config.prompts.model_copy(update={"path": args.prompts})
    if args.budget is not None:
        update["budget_minutes"] = minutes(args.budget, "--budget")
    # torch and transformers take seconds to import: a mistyped key is reported before that.
    from scripts.advice.run import advise
    from scripts.steps import stop

    signal.signal(signal.SIGTERM, stop)
    with folder_lock(Path(config.output)):
        return advise(config.model_copy(update=update))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("target", metavar="TARGET", help="the model to become faster: a Hub id, a folder, a .gguf file")
    parser.add_argument("--prompts", metavar="FILE", help="what it will be asked, in random order")
    parser.add_argument("--budget", metavar="TIME", help="wall clock for all, such as 30m or 2h (default: budget_minutes)")


if __name__ == "__main__":
    description = "Train small trials for a target and its prompts, and say which draft to train."
    sys.exit(run_command(AdviceConfig, main, description=description, add_arguments=add_arguments))

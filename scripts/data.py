"""Prompts in, conversations written by the target out: `python scripts/data.py --config configs/data/heads.yaml`.

Under `accelerate launch` several processes share the work. Rerun the same command to resume.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.runtime.errors import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from configs.runtime.terminal import printable
from configs.schema.data import DataConfig

LABEL, PLAIN = "\x1b[32m", "\x1b[0m"  # green, and back


def main(config: DataConfig, arguments: argparse.Namespace) -> None:
    """Make the data set that `config` describes, or show rows of one that was made."""
    if arguments.show is not None:
        show_rows(config, arguments.show)
        return
    # torch and transformers take seconds to import: a mistyped key is reported before that.
    from distill.generation.make_dataset import make_dataset

    make_dataset(config)


def show_rows(config: DataConfig, number: int) -> None:
    """Print the first rows of the training side as texts, what is learnt of them in green, or on no terminal in [[ ]]."""
    from distill.dataset.conversations import open_conversations
    from heads.frozen.identity import locate
    from heads.frozen.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(locate(config.target), config.target)
    begin, end = (LABEL, PLAIN) if sys.stdout.isatty() else ("[[", "]]")
    for row in open_conversations(Path(config.output) / "train.jsonl")[:number]:
        ids, shown, start = row.prompt_ids + row.answer_ids, "", 0
        for first, after in row.spans:
            before, learnt = (printable(str(tokenizer.decode(list(part)))) for part in (ids[start:first], ids[first:after]))
            shown, start = f"{shown}{before}{begin}{learnt}{end}", after
        print(f"--- {printable(row.prompt_id)}, {sum(map(len, row.answers))} of {len(ids)} tokens are learnt\n{shown}\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument(
        "--show", metavar="N", type=int, help="print N rows of the data that was made, and what is learnt of them"
    )


if __name__ == "__main__":
    description = "Let the target write training conversations."
    sys.exit(run_command(DataConfig, main, description=description, add_arguments=add_arguments))

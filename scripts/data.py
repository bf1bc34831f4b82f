"""Prompts in, conversations written by the target out: `python scripts/data.py --config configs/data/heads.yaml`.

Under `accelerate launch` several processes share the work. Rerun the same command to resume.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.runtime.errors import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from configs.schema.data import DataConfig


def main(config: DataConfig) -> None:
    """Make the data set that `config` describes."""
    # torch and transformers take seconds to import: a mistyped key is reported before that.
    from distill.generation.make_dataset import make_dataset

    make_dataset(config)


if __name__ == "__main__":
    sys.exit(run_command(DataConfig, main, description="Let the target write training conversations."))

"""Distil a target into a small draft model.

Run it by `accelerate launch train/distill.py --config configs/distill/draft_lm.yaml`. Writes OUTPUT/artifact (the best draft by
tokens per target step on held-out prompts), checkpoints, trackers, run.json, metrics.jsonl (steps and evaluations) and
outcome.json; see docs/running.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.runtime.errors import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from configs.schema.training import DistillConfig


def main(config: DistillConfig) -> int:
    from train.launch import run_distillation

    return run_distillation(config)


if __name__ == "__main__":
    sys.exit(run_command(DistillConfig, main, description=__doc__))

"""Train a head on the frozen target: EAGLE-3, MTP, Medusa, Hydra, P-EAGLE, DFlash, DSpark, DFlash2, XPress, Domino, early exit.

Run it by `accelerate launch train/heads.py --config configs/heads/eagle3.yaml`. Checks in seconds that the head can be
written, read back and learnt (`sanity`), then trains. Writes OUTPUT/artifact (the best head by tokens per target step on
held-out prompts), checkpoints, trackers, run.json, metrics.jsonl (steps, and evaluations: what was decoded and
what agreement predicts) and outcome.json; see docs/running.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.runtime.errors import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from configs.schema.training import HeadsConfig


def main(config: HeadsConfig) -> int:
    from train.launch import run_heads

    return run_heads(config)


if __name__ == "__main__":
    sys.exit(run_command(HeadsConfig, main, description=__doc__))

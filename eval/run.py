"""Decode a suite of prompts with a draft, compare with plain decoding, write the report.

Run it by `python eval/run.py --config configs/eval/heads.yaml`, or by `accelerate launch` in place of `python`: several
processes then share the prompts. Writes OUTPUT/report.json, report.html, report.md, records.jsonl and run.json. Rerun the same
command to resume a run that was cut off.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.runtime.errors import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from configs.schema.evaluation import EvalConfig


def main(config: EvalConfig) -> int:
    """Evaluate. What needs torch is imported here, so that a typo in the config is reported at once."""
    from eval.evaluation import evaluate
    from heads.frozen.processes import naming_lost_processes

    with naming_lost_processes():
        return evaluate(config)


if __name__ == "__main__":
    sys.exit(run_command(EvalConfig, main, description=__doc__))

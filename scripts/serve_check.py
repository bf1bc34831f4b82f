"""Drafts in real engines, into docs/results/serve.json: `python scripts/serve_check.py --config configs/serve/smollm2.yaml`.

Exports each draft, starts its engine on it in the engine's own environment, and sends held-out prompts greedily. The engine's
answers must be plain decoding's, and what its own counters say of accepted drafts must lie in the interval that our decoder
finds on the same prompts. Ends with 1 where an engine disagrees.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from configs.runtime.command import run_command
from configs.schema.benchmarks import ServeCheckConfig


def main(config: ServeCheckConfig) -> int:
    """Run the check. What needs torch is imported here, so that a typo in the config is reported at once."""
    from scripts.engine_check.cases import run_checks

    return run_checks(config)


if __name__ == "__main__":
    sys.exit(run_command(ServeCheckConfig, main, description="Compare served drafts with our decoder, engine by engine."))

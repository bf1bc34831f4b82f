"""Measure every head family on one target and one set of data, and EAGLE-3's training beside speculators', into
docs/results/heads.json.

    make bench-heads

Makes the data where it is not there, trains each recipe in a process of its own, and decodes held-out prompts with what came
out, plain decoding in turns with it. A training that is finished is kept as long as its recipe and data are the same, so that
only the first run takes hours; the recipes say how many. For the comparison with speculators, which is no dependency of this
project, first `.venv/bin/pip install --no-deps speculators==0.9.0 hs-connectors loguru pydantic-settings openai jiter sniffio`.
Ends with 1 where an answer differs from plain decoding's by more than a numerical tie, or where the two sides of a comparison
do not compute the same loss.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from configs.runtime.command import run_command
from configs.schema.benchmarks import BenchHeadsConfig


def main(config: BenchHeadsConfig) -> int:
    """Run the benchmark. What needs torch is imported here, so that a typo in the config is reported at once."""
    from scripts.bench.heads.benchmark import compare_heads

    return compare_heads(config)


if __name__ == "__main__":
    sys.exit(run_command(BenchHeadsConfig, main, description="Measure every head family on one target, and its training."))

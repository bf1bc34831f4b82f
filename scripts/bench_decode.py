"""Measure the decoder beside transformers' own generation, into docs/results/decode.json.

    make bench-decode

On the embedded target with the demo's draft (run `make demo` first), about ten minutes on two cores. Ends with 1 where the
two sides' greedy answers differ by more than a numerical tie.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from configs.runtime.command import run_command
from configs.schema.benchmarks import BenchDecodeConfig


def main(config: BenchDecodeConfig) -> int:
    """Run the benchmark. What needs torch is imported here, so that a typo in the config is reported at once."""
    from scripts.bench.decode.benchmark import compare_decoding

    return compare_decoding(config)


if __name__ == "__main__":
    sys.exit(run_command(BenchDecodeConfig, main, description="Measure the decoder beside transformers' generation."))

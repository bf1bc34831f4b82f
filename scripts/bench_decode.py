"""Measure the decoder beside transformers' own generation, into docs/results/decode.json.

    make bench-decode

On the embedded target with the demo's draft (run `make demo` first), about ten minutes on two cores. Ends with 1 where the
two sides' greedy answers differ by more than a numerical tie.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run as a script, Python puts scripts/ first on the path; the project's packages lie one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.benchmarks import BenchDecodeConfig
from configs.command import run_command


def main(config: BenchDecodeConfig) -> int:
    """Run the benchmark. What needs torch is imported here, so that a typo in the config is reported at once."""
    from scripts.decode_comparison import compare_decoding

    return compare_decoding(config)


if __name__ == "__main__":
    sys.exit(run_command(BenchDecodeConfig, main, description="Measure the decoder beside transformers' generation."))

"""Write the table of nearest codes for `decode.lossy`: `python eval/neighbours.py --set codebook=FILE --set vocab_size=N`."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from configs.schema.decoding import NeighboursConfig


def main(config: NeighboursConfig) -> None:
    from eval.decoder.relaxed import write_table

    write_table(config)


if __name__ == "__main__":
    sys.exit(run_command(NeighboursConfig, main, description="Write the table of each code's nearest ones."))

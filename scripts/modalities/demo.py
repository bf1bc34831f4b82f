"""The whole loop on tokens that are no text: `make demo-images`.

A target is trained from scratch on codes of scikit-learn's digits (`scripts.modalities.digits`), writes the data for an EAGLE-3
head, and is decoded with that strictly and relaxed. The last page shows plain, strict and relaxed pictures side by side, and a
gate says whether relaxing pays for what it costs. Finished steps are skipped, as by `scripts/demo.py`, whose exit codes it has.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import EPILOG, Parser, exit_code
from configs.runtime.files import folder_lock
from scripts.demo import GATE_ENTRY, LAUNCH, ROOT, run_steps, stop

RUN = Path("runs/demo_images")
STRICT, RELAXED, BESIDE = RUN / "strict", RUN / "relaxed", RUN / "side_by_side.html"
PAGES = {"strict": STRICT / "report.html", "relaxed": RELAXED / "report.html", "three side by side": BESIDE}
REPORTS = [str(each / "report.json") for each in (STRICT, RELAXED)]
TABLE = [f"codebook={RUN}/codebook.npy", "vocab_size=128", f"output={RUN}/neighbours.safetensors"]

STEPS = {
    "target: codes of the digits, a classifier, a model": ["scripts/modalities/digits.py"],
    "neighbours: the nearest codes of each": ["eval/neighbours.py", *(part for each in TABLE for part in ("--set", each))],
    "data: the target draws pictures": ["scripts/make_data.py", "--config", "configs/data/digits.yaml"],
    "head: train EAGLE-3": [*LAUNCH, "train/heads.py", "--config", "configs/heads/digits.yaml"],
    "evaluate: draw strictly": ["eval/run.py", "--config", "configs/eval/digits.yaml"],
    "evaluate: draw relaxed": ["eval/run.py", "--config", "configs/eval/digits_relaxed.yaml"],
    "compare: plain, strict, relaxed": ["eval/compare.py", *REPORTS, "--set", f"output={BESIDE}"],
    "gate: what relaxing gives and takes": [
        *(GATE_ENTRY, REPORTS[1]),
        *("--baseline", REPORTS[0], "--config", "configs/gates/digits.yaml"),
    ],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = Parser(description="Pictures of digits: data, training, strict and relaxed.", epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--fresh", action="store_true", help=f"remove {RUN} and run every step anew")

    def run() -> int:
        arguments = parser.parse_args(argv)
        signal.signal(signal.SIGTERM, stop)
        with folder_lock(ROOT / RUN, beside=True):
            if arguments.fresh:
                shutil.rmtree(ROOT / RUN, ignore_errors=True)
            return run_steps(ROOT / RUN, STEPS, pages=PAGES)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())

"""The whole loop on the embedded model, and how long each part took.

    make demo

The commands one would type: the target writes the data, a draft LM is distilled and a head trained on it, each is evaluated,
and a gate judges each report. Every step runs anew; only the target stays in `.cache/`. Ends with the exit code of the first
step that fails, or with 0.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = Path("runs/demo")

LAUNCH = ("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/one_process_cpu.yaml")
GATE = ("--config", "configs/gates/demo.yaml")
REPORTS = {"draft LM": RUN / "eval", "head": RUN / "eval_head"}

STEPS = {
    "target: fetch and unpack": [
        "-c",
        "from heads.target.demo_model import NAME, PREFIX, embedded_folder; embedded_folder(PREFIX + NAME)",
    ],
    "data: the target writes prompts and answers": ["scripts/make_data.py", "--config", "configs/data/demo.yaml"],
    "distil: train a draft LM": [*LAUNCH, "train/distill.py", "--config", "configs/distill/demo.yaml"],
    "head: train a Hydra head": [*LAUNCH, "train/heads.py", "--config", "configs/heads/demo.yaml"],
    "evaluate: decode with the draft LM": ["eval/run.py", "--config", "configs/eval/demo.yaml"],
    "evaluate: decode with the head": ["eval/run.py", "--config", "configs/eval/demo_head.yaml"],
    "gate: the draft LM's verdict": ["eval/gate.py", str(REPORTS["draft LM"] / "report.json"), *GATE],
    "gate: the head's verdict": ["eval/gate.py", str(REPORTS["head"] / "report.json"), *GATE],
}


def main() -> int:
    """Run the steps in order; stop at the first that fails and return its code."""
    shutil.rmtree(ROOT / RUN, ignore_errors=True)
    seconds = {}
    code = 0
    for name, arguments in STEPS.items():
        print(f"\n== {name}\n   {' '.join(['python', *arguments])}", flush=True)
        started = time.monotonic()
        code = subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False).returncode
        seconds[name] = time.monotonic() - started
        if code:
            print(f"\n== stopped: {name.partition(':')[0]} ended with {code}")
            break
    print("\n== time")
    for name, spent in [*seconds.items(), ("in all", sum(seconds.values()))]:
        print(f"   {spent:7.1f} s  {name}")
    print()
    for name, folder in REPORTS.items():
        page = folder / "report.html"
        print(f"report of the {name}: {page if (ROOT / page).exists() else 'none'}")
    print(f"exit code: {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())

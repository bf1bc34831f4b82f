"""The whole loop on the embedded model, and how long each part took.

    make demo

Four commands, the same that a person would type: data written by the target, a draft distilled from it, an evaluation of
the draft, a gate on the report. Results of finished steps are made anew each time, but for the target, which stays in
`.cache/`. Ends with the gate's exit code.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = Path("runs/demo")

STEPS = {
    "target: fetch and unpack": [
        "-c",
        "from distill.embedded import NAME, PREFIX, embedded_folder; embedded_folder(PREFIX + NAME)",
    ],
    "data: the target writes prompts and answers": ["scripts/make_data.py", "--config", "configs/data/demo.yaml"],
    "distil: train the draft": [
        *("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/one_process_cpu.yaml"),
        *("train/distill.py", "--config", "configs/distill/demo.yaml"),
    ],
    "evaluate: decode with it": ["eval/run.py", "--config", "configs/eval/demo.yaml"],
    "gate: the verdict": ["eval/gate.py", str(RUN / "eval/report.json"), "--config", "configs/gates/demo.yaml"],
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
    report = RUN / "eval/report.html"
    print(f"\nreport: {report if (ROOT / report).exists() else 'none'}   exit code: {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())

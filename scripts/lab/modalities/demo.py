"""The whole loop on tokens that are no text: `make demo-images`, `make demo-speech WAVS=folder`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import EPILOG, Parser, exit_code
from configs.runtime.errors import InputError
from configs.runtime.files import folder_lock
from configs.runtime.loading import read_values
from configs.runtime.resumable import files_fingerprint
from scripts.run.steps import CPU_LAUNCH, GATE_ENTRY, LAUNCH, Step, run_step, run_steps, stop

RUNS = {"images": Path("runs/demo_images"), "speech": Path("runs/demo_speech")}
RECIPES = {"images": "digits", "speech": "speech"}  # the configs' name
NUM_CODES = {"images": 128, "speech": 256}  # of the vocabulary, which begins with them


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description="Pictures or speech: data, training, strict and relaxed.", epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("kind", choices=RUNS, help="images: scikit-learn's digits; speech: your recordings")
    parser.add_argument("--wavs", type=Path, help="speech: folder of WAV files, named WORD_....wav")

    def run() -> int:
        arguments = parser.parse_args(argv)
        kind, wavs = arguments.kind, arguments.wavs
        if (kind == "speech") != (wavs is not None):
            raise InputError("speech needs recordings, and images take none: make demo-speech WAVS=folder, make demo-images")
        signal.signal(signal.SIGTERM, stop)
        with folder_lock(RUNS[kind], beside=True):
            made_of = "" if wavs is None else files_fingerprint([wavs])
            return run_steps(RUNS[kind], [_step(*each) for each in steps(kind, wavs).items()], made_of)

    return exit_code(run)


def _step(name: str, arguments: list[str]) -> Step:
    """Return a command as a step, whose folder is the output that its config names."""
    configs = [read_values(each) for each in arguments if each.endswith(".yaml")]
    outputs = [Path(each["output"]) for each in configs if "output" in each]
    return Step(
        name=name,
        folder=outputs[-1] if outputs else None,
        decided_by=[arguments, configs],
        run=lambda: run_step(arguments),
        judges=GATE_ENTRY in arguments,
    )


def steps(kind: str, wavs: Path | None = None) -> dict[str, list[str]]:
    folder, name = RUNS[kind], RECIPES[kind]
    strict, relaxed = (str(folder / each / "report.json") for each in ("strict", "relaxed"))
    recordings = [] if wavs is None else [str(wavs.resolve())]
    return {
        "target: codes, a classifier, a model": [f"scripts/lab/modalities/{name}.py", *recordings],
        "data: the target writes answers": ["scripts/data.py", "--config", f"scripts/lab/configs/data/{name}.yaml"],
        "head: train EAGLE-3": [*LAUNCH, CPU_LAUNCH, "train/heads.py", "--config", f"scripts/lab/configs/heads/{name}.yaml"],
        "evaluate: decode strictly": ["eval/run.py", "--config", f"scripts/lab/configs/eval/{name}.yaml"],
        "evaluate: decode relaxed": ["eval/run.py", "--config", f"scripts/lab/configs/eval/{name}_relaxed.yaml"],
        "compare: plain, strict, relaxed": [
            *("eval/compare.py", strict, relaxed),
            *("--set", f"output={folder}/side_by_side.html"),
        ],
        "gate: what relaxing gives and takes": [
            *(GATE_ENTRY, relaxed),
            *("--baseline", strict, "--config", f"scripts/lab/configs/gates/{name}.yaml"),
        ],
    }


if __name__ == "__main__":
    sys.exit(main())

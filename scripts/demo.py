"""The whole loop on the embedded model, and how long each part took.

    make demo
    make demo TARGET=./my-model PROMPTS=prompts.csv

The commands one would type: the target writes the data, a draft LM is distilled and a head trained on it, each is evaluated,
and a gate judges each report. Steps that a run before has finished are skipped, unless their commands, their configs or a step
before them changed. It ends with the code of the first step that fails; of two gates with the worse verdict's. Stopped, it
stops the step under way.
On a target, prompts or data of one's own (`scripts/own_demo`) it first says what that takes, and on a terminal asks.
"""

from __future__ import annotations

import itertools
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import EPILOG, INTERRUPTED, Parser, exit_code
from configs.runtime.files import folder_lock
from configs.runtime.loading import parse_yaml, read_values
from scripts import steps as shared
from scripts.own_demo import OwnLoop, add_own_arguments, is_own
from scripts.steps import GATE_ENTRY, Step, run_step, stop

RUN = Path("runs/demo")
LAUNCH = ("-m", "accelerate.commands.launch", "--quiet", "--config_file", "configs/accelerate/one_process_cpu.yaml")
GATE = ("--config", "configs/gates/demo.yaml")

STEPS = {
    "target: fetch and unpack": [
        "-c",
        "from heads.frozen.identity import NAME, PREFIX, embedded_folder; embedded_folder(PREFIX + NAME)",
    ],
    "data: the target writes prompts and answers": ["scripts/make_data.py", "--config", "configs/data/demo.yaml"],
    "distil: train a draft LM": [*LAUNCH, "train/distill.py", "--config", "configs/distill/demo.yaml"],
    "head: train a Hydra head": [*LAUNCH, "train/heads.py", "--config", "configs/heads/demo.yaml"],
    "evaluate: decode with the draft LM": ["eval/run.py", "--config", "configs/eval/demo.yaml"],
    "evaluate: decode with the head": ["eval/run.py", "--config", "configs/eval/demo_head.yaml"],
    "gate: the draft LM's verdict": [GATE_ENTRY, str(RUN / "eval" / "report.json"), *GATE],
    "gate: the head's verdict": [GATE_ENTRY, str(RUN / "eval_head" / "report.json"), *GATE],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = Parser(description="Data, training, evaluation and gate on a small model.", epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--fresh", action="store_true", help=f"remove {RUN}, or the target's folder, and run every step anew")
    add_own_arguments(parser)

    def run() -> int:
        arguments = parser.parse_args(argv)
        folder, steps, made_of = RUN, STEPS, ""
        if is_own(arguments):
            loop = OwnLoop(arguments)
            folder, steps, made_of = loop.run, loop.steps(STEPS), loop.made_of
            if arguments.fresh:
                loop.check_removable(folder)
            print(loop.plan_text(steps), flush=True)
            if not arguments.yes and sys.stdin.isatty() and input("\ngo on? [y/N] ").strip().lower() not in ("y", "yes"):
                print("nothing was run")
                return INTERRUPTED
        signal.signal(signal.SIGTERM, stop)
        with folder_lock(folder, beside=True):
            if arguments.fresh:
                shutil.rmtree(folder, ignore_errors=True)
            return run_steps(folder, steps, made_of)

    return exit_code(run)


def run_steps(folder: Path, steps: Mapping[str, list[str]], made_of: str = "") -> int:
    """Run commands that are not finished, and move aside what others began; return the worst verdict or a failure's code."""
    code = shared.run_steps(folder, [_step(folder, *step) for step in steps.items()], made_of, discard=_move_aside)
    print(f"\nexit code: {code}")
    return code


def _step(folder: Path, name: str, arguments: list[str]) -> Step:
    output = _output_of(arguments)
    inside = output is not None and output.resolve().is_relative_to(folder.resolve())

    def run() -> int:
        print(f"   {shlex.join(['python', *arguments])}", flush=True)
        return run_step(arguments)

    return Step(
        name=name,
        folder=output if inside else None,
        decided_by=[arguments, [read_values(each) for each in arguments if each.endswith(".yaml")]],
        run=run,
        judges=GATE_ENTRY in arguments,
    )


def _output_of(arguments: Sequence[str]) -> Path | None:
    """Return the folder that a step's config names as its output; None where it names none."""
    if "--config" not in arguments:
        return None
    named = read_values(arguments[arguments.index("--config") + 1]).get("output")
    given = [each.removeprefix("output=") for each in arguments if each.startswith("output=")]
    output = parse_yaml(given[-1], "--set output") if given else named
    return None if output is None else Path(str(output))


def _move_aside(folder: Path) -> None:
    """Give a folder the next free name of `folder.before-1`, `folder.before-2`, ..."""
    free = (folder.with_name(f"{folder.name}.before-{number}") for number in itertools.count(1))
    aside = next(path for path in free if not path.exists())
    folder.rename(aside)
    print(f"   {folder} is of other settings; it is kept as {aside}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

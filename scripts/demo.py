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
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import DONE, EPILOG, FAILED, GATE_FAILED, INCONCLUSIVE, INTERRUPTED, Parser, exit_code
from configs.runtime.errors import Stopped
from configs.runtime.files import CHECKOUT, find_shipped, folder_lock, read_json, write_json
from configs.runtime.loading import parse_yaml, read_values
from configs.runtime.resumable import fingerprint
from scripts.own_demo.estimate import plan_text
from scripts.own_demo.steps import add_own_arguments, is_own, own_loop

RUN = Path("runs/demo")
RECORD = "finished.json"  # in the run's folder: the fingerprint of each step, by name, and whether it is only begun
GRACE_SECONDS = 60  # for a step to write its checkpoint, once it is asked to stop

LAUNCH = ("-m", "accelerate.commands.launch", "--quiet", "--config_file", "configs/accelerate/one_process_cpu.yaml")
GATE_ENTRY = "eval/gate.py"
GATE = ("--config", "configs/gates/demo.yaml")
SEVERITY = (DONE, INCONCLUSIVE, GATE_FAILED)  # of verdicts
REPORTS = {"draft LM": RUN / "eval", "head": RUN / "eval_head"}

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
    "gate: the draft LM's verdict": [GATE_ENTRY, str(REPORTS["draft LM"] / "report.json"), *GATE],
    "gate: the head's verdict": [GATE_ENTRY, str(REPORTS["head"] / "report.json"), *GATE],
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
            loop = own_loop(arguments)
            folder, steps, made_of = loop.run, loop.steps(STEPS), loop.made_of()
            if arguments.fresh:
                loop.check_removable(folder)
            print(plan_text(loop, steps), flush=True)
            if not arguments.yes and sys.stdin.isatty() and input("\ngo on? [y/N] ").strip().lower() not in ("y", "yes"):
                print("nothing was run")
                return INTERRUPTED
        signal.signal(signal.SIGTERM, stop)
        with folder_lock(folder, beside=True):
            if arguments.fresh:
                shutil.rmtree(folder, ignore_errors=True)
            return run_steps(folder, steps, made_of)

    return exit_code(run)


def run_steps(folder: Path, steps: Mapping[str, list[str]], made_of: str = "", pages: Mapping[str, Path] | None = None) -> int:
    """Run the steps in order, but for those that a run before has finished; stop at the first that fails, return its code.

    A gate's verdict stops nothing: the worst is returned. A step that was begun or finished by other commands, configs or data
    could not go on from its output, which is moved aside first.

    Args:
        folder: of their outputs.
        steps: their commands.
        made_of: a fingerprint of what they read besides configs.
        pages: of the reports, to be named at the end; None: those of this demo.
    """
    record = folder / RECORD
    finished = read_json(record, "record of the demo") if record.exists() else {}
    seconds: dict[str, float] = {}
    code, known = DONE, made_of
    for name, arguments in steps.items():
        configs = [read_values(each) for each in arguments if each.endswith(".yaml")]
        known = fingerprint(known, arguments, configs)
        if finished.get(name) == known:
            print(f"\n== {name}: already finished; --fresh runs it again", flush=True)
            continue
        print(f"\n== {name}\n   {shlex.join(['python', *arguments])}", flush=True)
        begun = f"{known} begun"
        output = _output_of(arguments)
        inside = output is not None and output.exists() and output.resolve().is_relative_to(folder.resolve())
        if output is not None and inside and finished.get(name, begun) != begun:
            print(f"   {output} is of other settings; it is kept as {_move_aside(output)}", flush=True)
        finished[name] = begun
        write_json(record, finished)
        started = time.monotonic()
        ended = run_step(arguments)
        seconds[name] = time.monotonic() - started
        if ended == DONE:
            finished[name] = known
            write_json(record, finished)
        elif GATE_ENTRY in arguments and ended in SEVERITY:
            code = max(code, ended, key=SEVERITY.index)
        else:
            code = ended
            print(f"\n== stopped: {name.partition(':')[0]} ended with {ended}")
            break
    print("\n== time")
    for name, spent in [*seconds.items(), ("in all", sum(seconds.values()))]:
        print(f"   {spent:7.1f} s  {name}")
    print()
    own = {f"report of the {name}": folder / place.name / "report.html" for name, place in REPORTS.items()}
    for name, page in (own if pages is None else pages).items():
        print(f"{name}: {page if page.exists() else 'none'}")
    print(f"exit code: {code}")
    return code


def _move_aside(folder: Path) -> Path:
    """Give a folder the next free name of `folder.before-1`, `folder.before-2`, ...; return it."""
    free = (folder.with_name(f"{folder.name}.before-{number}") for number in itertools.count(1))
    aside = next(path for path in free if not path.exists())
    folder.rename(aside)
    return aside


def _output_of(arguments: Sequence[str]) -> Path | None:
    """Return the folder that a step's config names as its output; None where it names none."""
    if "--config" not in arguments:
        return None
    config = arguments[arguments.index("--config") + 1]
    named = read_values(config).get("output")
    given = [each.removeprefix("output=") for each in arguments if each.startswith("output=")]
    output = parse_yaml(given[-1], "--set output") if given else named
    return None if output is None else Path(str(output))


def run_step(arguments: Sequence[str]) -> int:
    """Run a step in a session of its own and return its exit code; end all of its processes if this one is stopped.

    Args:
        arguments: of Python; entries and configs that came with draftsmith are found from any folder.
    """
    early: list[int] = []  # signals that came before the process was known, and could be ended
    handlers = {
        each: signal.signal(each, lambda number, frame: early.append(number)) for each in (signal.SIGINT, signal.SIGTERM)
    }
    process = subprocess.Popen([sys.executable, *map(_located, arguments)], start_new_session=True)
    try:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number in early:
            signal.raise_signal(number)
        code = process.wait()
    except BaseException:
        _end(process)
        raise
    judged = any(each.endswith(GATE_ENTRY) for each in arguments)
    if code == GATE_FAILED and not judged:  # accelerate's launcher ends with 1 whatever happened
        return FAILED
    return code if code >= 0 else 128 - code  # as a shell reports a signal


def _located(argument: str) -> str:
    """Return an argument, or the path of the entry or config that it names; entries are those of this process's code."""
    if argument.endswith(".py") and (CHECKOUT / argument).is_file():
        return str(CHECKOUT / argument)
    return str(find_shipped(argument)) if argument.endswith(".yaml") else argument


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the processes of a step to end, wait for them, and kill those that take too long, or at a second Ctrl-C."""
    with suppress(ProcessLookupError):
        try:
            os.killpg(process.pid, signal.SIGTERM)
            until = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < until:
                process.poll()
                os.killpg(process.pid, 0)  # raises where none is left
                time.sleep(0.1)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def stop(number: int, frame: FrameType | None) -> None:
    """Raise what a step under way is stopped by."""
    raise Stopped("stopped by SIGTERM; run it again to go on")


if __name__ == "__main__":
    sys.exit(main())

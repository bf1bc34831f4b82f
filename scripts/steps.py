"""Steps of a long command, one after another: those that are finished are skipped, and what a step started ends with it.

A step whose settings, or those of a step before it, have changed since it began does not resume from what it wrote.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from configs.runtime.command import DONE, FAILED, GATE_FAILED, INCONCLUSIVE
from configs.runtime.errors import Stopped
from configs.runtime.files import CHECKOUT, find_shipped, read_object, write_json
from configs.runtime.resumable import fingerprint

RECORD = "steps.json"  # in the output: by name, the fingerprint of each step that was begun, and whether it is done
GRACE_SECONDS = 60  # for a step to write its checkpoint, once it is asked to stop
GATE_ENTRY = "eval/gate.py"
SEVERITY = (DONE, INCONCLUSIVE, GATE_FAILED)  # of verdicts


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a run."""

    name: str
    folder: Path | None  # that it alone writes, below the output
    decided_by: Any  # JSON values that decide what it writes, besides the steps before it
    run: Callable[[], int | None]  # returns an exit code; None is done
    judges: bool = False  # its code is a gate's verdict, which stops nothing


def run_steps(output: Path, steps: Sequence[Step], inputs: str, discard: Callable[[Path], None] = shutil.rmtree) -> int:
    """Run what is not finished; return the code of the first step that fails, else the worst verdict.

    `inputs` is a fingerprint of what the steps read; `discard` gets the folder of a step that was begun by other settings.
    """
    record = output / RECORD
    finished = read_object(record, "record of the steps") if record.is_file() else {}
    worst, known = DONE, inputs
    for step in steps:
        known = fingerprint(known, step.name, step.decided_by)
        before = finished.get(step.name)
        if before == {"job": known, "done": True}:
            print(f"\n== {step.name}: already finished", flush=True)
            continue
        print(f"\n== {step.name}", flush=True)
        if before is not None and before["job"] != known and step.folder is not None and step.folder.exists():
            discard(step.folder)
        finished[step.name] = {"job": known, "done": False}
        write_json(record, finished)
        started = time.monotonic()
        code = step.run() or DONE
        print(f"   {time.monotonic() - started:.1f} s", flush=True)
        if code == DONE:
            finished[step.name]["done"] = True
            write_json(record, finished)
        elif step.judges and code in SEVERITY:
            worst = max(worst, code, key=SEVERITY.index)
        else:
            print(f"\n== stopped: {step.name.partition(':')[0]} ended with {code}")
            return code
    return worst


def run_step(arguments: Sequence[str]) -> int:
    """Run Python with these arguments in a session of its own, which ends with this process; return its exit code."""
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
        end_group(process)
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


def end_group(process: subprocess.Popen[Any], grace_seconds: float = GRACE_SECONDS) -> None:
    """Ask the processes of a session to end, wait for them, and kill those that take too long, or at a second Ctrl-C."""
    with suppress(ProcessLookupError):
        try:
            os.killpg(process.pid, signal.SIGTERM)
            until = time.monotonic() + grace_seconds
            while time.monotonic() < until:
                process.poll()
                os.killpg(process.pid, 0)  # raises where none is left
                time.sleep(0.1)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stop(number: int, frame: FrameType | None) -> None:
    """Raise what a step under way is stopped by."""
    raise Stopped("stopped by SIGTERM; run it again to go on")

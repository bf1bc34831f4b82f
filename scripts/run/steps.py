"""The record of a run's stages, and the processes that they start, which end with what has started them."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from configs.runtime.command import DONE, EXIT_CODE_FILE, FAILED, GATE_FAILED, INCONCLUSIVE
from configs.runtime.errors import Stopped
from configs.runtime.files import CHECKOUT, find_shipped, read_object, write_json
from configs.runtime.terminal import PROGRESS_FILE, STAGE

RECORD = "steps.json"  # in the output: the names of all stages, their planned minutes, and what became of each that was begun
PROCESS = "process.json"  # beside it: which process is at work on a step
LAUNCH = ("-m", "accelerate.commands.launch", "--quiet", "--config_file")  # and the file
GRACE_SECONDS = 60  # for a step to write its checkpoint, once it is asked to stop
SEVERITY = (DONE, INCONCLUSIVE, GATE_FAILED)  # of verdicts


class Record:
    """The record of a run's stages on disk."""

    def __init__(self, output: Path, stages: Sequence[str], planned_minutes: Mapping[str, float]) -> None:
        self.output = output
        path = output / RECORD
        kept = read_object(path, "record of the steps") if path.is_file() else {}
        self.steps: dict[str, dict[str, Any]] = kept.get("steps", {})
        self._head = {"stages": list(stages), "planned_minutes": dict(planned_minutes)}

    @contextmanager
    def step(self, name: str, job: str) -> Iterator[dict[str, Any]]:
        """Note that a step begins and, whatever becomes of it, how long it took; the caller adds `done` and `code`."""
        started = time.monotonic()  # the clock may be set meanwhile
        entry = self.steps[name] = {"job": job, "done": False, "began": time.time()}
        progress = self.output / "progress.json"
        os.environ.update({PROGRESS_FILE: str(progress.absolute()), STAGE: name})
        self._write()
        try:
            yield entry
        finally:
            entry["seconds"] = time.monotonic() - started
            for variable in (PROGRESS_FILE, STAGE):
                os.environ.pop(variable, None)
            progress.unlink(missing_ok=True)
            self._write()

    def _write(self) -> None:
        write_json(self.output / RECORD, {**self._head, "steps": self.steps})


def run_step(arguments: Sequence[str], log: Path | None = None) -> int:
    """Run Python with these arguments in a session of its own, which ends with this process; return its exit code.

    What it says goes into the file `log` where one is named. Where this process is killed, the session is ended by the next one
    that goes on with the same record.
    """
    progress = os.environ.get(PROGRESS_FILE)
    note = None if progress is None else Path(progress).with_name(PROCESS)
    if note is not None:
        _end_left_over(note)
    early: list[int] = []  # signals that came before the process was known, and could be ended
    handlers = {
        each: signal.signal(each, lambda number, frame: early.append(number)) for each in (signal.SIGINT, signal.SIGTERM)
    }
    code_file = Path(tempfile.gettempdir()) / f"draftsmith-{os.getpid()}-{time.monotonic_ns()}"
    environment = os.environ | {EXIT_CODE_FILE: str(code_file)}
    with nullcontext() if log is None else log.open("ab") as said:
        command = [sys.executable, *map(_located, arguments)]
        process = subprocess.Popen(
            command, start_new_session=True, env=environment, stdout=said, stderr=said and subprocess.STDOUT
        )
    try:
        if note is not None:
            write_json(note, {"host": platform.node(), "pid": process.pid, "began": _began(process.pid)})
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number in early:
            signal.raise_signal(number)
        code = process.wait()
    except BaseException:
        end_group(process)
        raise
    finally:
        if note is not None:
            note.unlink(missing_ok=True)
        own = int(code_file.read_text(encoding="ascii") or FAILED) if code_file.is_file() else FAILED
        code_file.unlink(missing_ok=True)
    if code == GATE_FAILED and LAUNCH[1] in arguments:  # accelerate's launcher ends with 1 whatever happened
        return own
    return code if code >= 0 else 128 - code  # as a shell reports a signal


def _located(argument: str) -> str:
    """Return an argument, or the path of the entry or config that it names; entries are those of this process's code."""
    if argument.endswith(".py") and (CHECKOUT / argument).is_file():
        return str(CHECKOUT / argument)
    return str(find_shipped(argument)) if argument.endswith(".yaml") else argument


def end_group(process: subprocess.Popen[Any], grace_seconds: float = GRACE_SECONDS) -> None:
    """Ask the processes of a session to end, wait for them, and kill those that take too long, or at a second Ctrl-C."""
    _end_session(process.pid, grace_seconds, process.poll)
    process.wait()


def _end_session(pid: int, grace_seconds: float, reap: Callable[[], object] = lambda: None) -> None:
    with suppress(ProcessLookupError):
        try:
            os.killpg(pid, signal.SIGTERM)
            until = time.monotonic() + grace_seconds
            while time.monotonic() < until:
                reap()
                os.killpg(pid, 0)  # raises where none is left
                time.sleep(0.1)
        finally:
            os.killpg(pid, signal.SIGKILL)


def _end_left_over(note: Path) -> None:
    """End the session that a killed process has left at work, here and on the same step."""
    if not note.is_file():
        return
    left = read_object(note, "note of the process at work")
    pid = int(left["pid"])
    is_here = left["host"] == platform.node() and pid != os.getpgrp()
    if is_here and _began(pid) in (None, left["began"]):  # a session may outlive its first process
        _end_session(pid, GRACE_SECONDS)
    note.unlink()


def _began(pid: int) -> float | None:
    """Return when a process began; None where there is none of this number."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def stop(number: int, frame: FrameType | None) -> None:
    """Raise what a step under way is stopped by."""
    raise Stopped("stopped by SIGTERM; run it again to go on")

"""One file of hidden states, as vLLM's connector leaves it in a shared folder: waited for, read, deleted.

The server answers before the file is written, and until then holds a lock on the empty file `NAME.lock` beside it. Where a file
system does not carry locks from node to node, a file that is not whole yet is tried again until the time is up.
B batch, T positions, A taps, E width of the target.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from pathlib import Path
from threading import Event

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from configs.runtime.errors import InputError
from configs.runtime.files import inside

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.001, 0.05
UNWRITTEN_SECONDS = 5.0  # how long a file may be missing while its lock is free: network disks show it late
LEAST_FREE_BYTES = 2**20


class NotWritten(InputError):
    """A server answered, and its file did not come."""


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not there or cannot be written to; files are deleted once read."""
    if not folder.is_dir():
        raise InputError(f"target.states.path: {folder} is no folder here; give the one that servers and training share")
    probe = folder / ".draftsmith-probe"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"target.states.path: {folder} cannot be written to ({error.strerror}), and files are deleted there once read"
        ) from error


def take_states(folder: Path, name: str, timeout_seconds: float, stopping: Event) -> tuple[Tensor, list[int]]:
    """Return what a server wrote, states `[T, A, E]` and the token ids that it read, and delete its files.

    Args:
        folder: as it is called here; the server may know it by another path.
        name: of the file in it.
        timeout_seconds: how long to wait.
        stopping: ends the wait when it is set.

    Raises:
        NotWritten: it did not come, or never got whole.
        InputError: the disk is full, or the name leads out of the folder.
    """
    path = inside(folder, name, "target.states: a server's answer")
    lock = path.with_name(f"{path.name}.lock")
    deadline, wait = time.monotonic() + timeout_seconds, FIRST_WAIT_SECONDS
    missing_since: float | None = None
    try:
        while True:
            now, problem, held = time.monotonic(), "is not written", _is_held(lock)
            if not held:
                try:
                    tensors = load(path.read_bytes())
                    return tensors["hidden_states"], tensors["token_ids"].tolist()
                except FileNotFoundError:
                    problem = "is not there"
                    missing_since = (missing_since or now) if held is not None else None
                except (SafetensorError, KeyError):
                    problem = "is not whole"
                except OSError as error:
                    raise InputError(f"target.states.path: {path} cannot be read ({error.strerror})") from error
            over = now > deadline or (missing_since is not None and now - missing_since > UNWRITTEN_SECONDS)
            if over or stopping.is_set():
                raise _complaint(folder, path, problem)
            stopping.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)
    finally:
        _delete(path, lock)


def _delete(*paths: Path) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"target.states.path: {path} cannot be deleted ({error.strerror})") from error


def _is_held(lock: Path) -> bool | None:
    """Return whether a server holds the lock; None where there is none, yet or at all."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return True
    return False


def _complaint(folder: Path, path: Path, problem: str) -> InputError:
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE_BYTES:
        return InputError(f"target.states.path: the disk of {folder} is full ({free} bytes are free); free space there")
    return NotWritten(
        f"its file {path.name} {problem} in target.states.path {folder}: is that the folder it was started with, and has its "
        "disk room?"
    )

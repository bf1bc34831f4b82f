"""Errors that every command turns into one line on stderr and an exit code: a mistake, a failed run, a stop on request.

And what an entry does first: one whose imports fail must not end with Python's own exit code, 1, which is a failed gate's. So
this imports the standard library alone: other packages may be what is missing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

BAD_INPUT = 2
FAILED = 70  # a run that cannot go on, or an error in draftsmith itself; sysexits.h calls it EX_SOFTWARE
INTERRUPTED = 130  # what a shell reports for Ctrl-C
OWN = ("configs", "heads", "distill", "eval", "train", "scripts")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # names of `mallopt` in glibc's malloc.h
KEPT = 2**30  # bytes at the end of the heap
MAPPED = 2**26  # bytes from which on a block is the kernel's own, and goes back to it


class InputError(ValueError):
    """A file, folder or value given by the user cannot be used. The message says what is wrong and what is accepted."""


class ConfigError(InputError):
    """A configuration file or a `--set` override is wrong. The message names the key, the value got, and what is accepted."""


class RunFailed(RuntimeError):
    """A run cannot go on, and its input is not known to be wrong: a loss that is not finite, a process that was lost.

    The message says all there is to say, so that a command prints it without a traceback.
    """


class Stopped(Exception):
    """The process was asked to end (SIGTERM) and has saved its work; the message says how to go on."""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, or the error's type where the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def first_finding(error: ValidationError, whole: str = "") -> str:
    """Return the first thing that pydantic finds wrong: where, and what; `whole` stands where it is the value itself."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"


# --- what an entry does first -----------------------------------------------------------------------------------------


def guard_imports() -> None:
    """Give errors that nothing catches exit codes of ours; a command's own errors get theirs by `exit_code`."""
    sys.excepthook = _end


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] not in OWN:
        print(f"error: {error}; make setup installs what is needed into .venv: activate it first", file=sys.stderr)
        raise SystemExit(BAD_INPUT)
    sys.__excepthook__(kind, error, trace)
    raise SystemExit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, up to a gibibyte; other C libraries are left alone, and what the environment says stands.

    By its own thresholds a tensor of some mebibytes may be new memory each time, which the kernel maps and zeroes page by page:
    that was a quarter of the loss's time on two cores.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(M_MMAP_THRESHOLD, MAPPED)
    mallopt(M_TRIM_THRESHOLD, KEPT)

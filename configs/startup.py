"""What an entry does before its other imports: one that fails must not end with Python's own exit code, 1, a failed gate's.

Imports nothing but the standard library: other packages may be what is missing.
"""

from __future__ import annotations

import sys
from types import TracebackType

BAD_INPUT = 2
FAILED = 70  # a run that cannot go on, or an error in draftsmith itself; sysexits.h calls it EX_SOFTWARE
INTERRUPTED = 130  # what a shell reports for Ctrl-C
OWN = ("configs", "heads", "distill", "eval", "train", "scripts")


def guard_imports() -> None:
    """Give errors that nothing catches exit codes of ours; a command's own errors get theirs by `exit_code`."""
    sys.excepthook = _end


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] not in OWN:
        print(f"error: {error}; make setup installs what is needed into .venv: activate it first", file=sys.stderr)
        raise SystemExit(BAD_INPUT)
    sys.__excepthook__(kind, error, trace)
    raise SystemExit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED)

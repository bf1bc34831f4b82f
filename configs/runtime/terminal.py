"""What commands say to a person: text that cannot command a terminal, the log, and the progress of long work.

Text from elsewhere, such as names in an artifact, may hold control characters, which start the escape sequences by which a
terminal is cleared, renamed or made to answer, and bidirectional ones, which show a text in another order than it has: both are
written out, as `\\x1b`. Progress is a bar on a terminal and plain log lines elsewhere, at most every `SECONDS_BETWEEN_LINES`;
of several processes only rank 0 shows it, and writes the file that `PROGRESS_FILE` names, for those who look in from outside.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from configs.runtime.redaction import redact

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_NOTES = 2.0
PROGRESS_FILE, STAGE = "DRAFTSMITH_PROGRESS", "DRAFTSMITH_STAGE"  # environment: where a stage says how far it is, and as what
LOGGER = logging.getLogger("draftsmith")
# All controls but tab and line feed, line and paragraph separators, directional marks, invisible tags, lone surrogates, and
# characters of no width but the two that join or part letters of some scripts.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Return a text with control characters written out; tabs and line ends stay."""
    return UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return a text on one line, printable."""
    return printable(" ".join(text.split()))


def say(text: str, file: TextIO | None = None) -> None:
    """Print a text, printable and without secrets; to standard output unless `file` is given."""
    print(redact(printable(text)), file=sys.stdout if file is None else file)


def show(text: str) -> bool:
    """Print a text as it is to standard output; False where its reader has seen enough and closed it, as `head` does."""
    try:
        print(text, flush=True)
        return True
    except BrokenPipeError:  # Python writes at its end what is buffered still: nowhere, or it would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False


def is_main_process() -> bool:
    """Return whether this process is rank 0, or the only one; read from the launcher's environment."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def setup_logging() -> None:
    """Log to stderr, one line a message: INFO and above from rank 0, errors from the others.

    Secrets are masked in the log and in the traceback of an uncaught error.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # other libraries' bars, redrawn, hide the lines of a log; read on import
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    LOGGER.handlers = [handler]
    LOGGER.setLevel(logging.INFO if is_main_process() else logging.ERROR)
    sys.excepthook = _print_traceback


class _StderrHandler(logging.Handler):
    """Writes to the present `sys.stderr`, which a running bar replaces so that lines appear above it."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record), sys.stderr)


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    say("".join(traceback.format_exception(kind, error, trace)).rstrip(), sys.stderr)


@contextmanager
def progress(description: str, total: int, unit: str = "it", done: int = 0) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds a number of finished items to the bar or the log.

    `done` of them were finished before, which says nothing of the rate.
    """
    work = _Work(description, total, unit, done)
    if is_main_process() and sys.stderr.isatty():
        work.last_line = math.inf  # the bar takes the place of the lines
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[pace]}")]
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(description, total=total, completed=done, pace="")

            def advance(count: int) -> None:
                work.advance(count)
                bar.update(task, advance=count, pace=work.pace)

            yield advance
        work.note()
        return
    yield work.advance
    work.finish()


class _Work:
    """Counts finished items; logs the count, the rate and the time left, and notes them in the file for others."""

    def __init__(self, description: str, total: int, unit: str, done: int) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done = self.before = done
        self.started = self.last_line = self.last_note = time.monotonic()
        self.file = os.environ.get(PROGRESS_FILE) if is_main_process() else None
        self.note()

    @property
    def share(self) -> float:
        return self.done / max(self.total, 1)

    @property
    def rate(self) -> float:
        """Items per second, since this process began."""
        return (self.done - self.before) / max(time.monotonic() - self.started, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        return (self.total - self.done) / self.rate if self.done > self.before else None

    @property
    def pace(self) -> str:
        left = "unknown" if self.seconds_left is None else clock(self.seconds_left)
        return f"{rate(self.rate, self.unit)}, {left} left"

    def advance(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if now - self.last_note >= SECONDS_BETWEEN_NOTES:
            self.last_note = now
            self.note()
        if now - self.last_line < SECONDS_BETWEEN_LINES or self.done == self.total:
            return
        self.last_line = now
        done = (self.description, self.done, self.total, self.unit, 100 * self.share)
        LOGGER.info("%s: %d/%d %s (%.0f %%), %s", *done, self.pace)

    def note(self) -> None:
        """Write how far the work is into the file that the environment names; the work goes on where that cannot be."""
        if self.file is None:
            return
        names = ("description", "done", "total", "unit", "rate", "seconds_left", "share")
        values = {"stage": os.environ.get(STAGE, ""), "time": time.time()} | {name: getattr(self, name) for name in names}
        path = Path(self.file)
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        with suppress(OSError):
            scratch.write_text(json.dumps(values), encoding="utf-8")
            scratch.replace(path)

    def finish(self) -> None:
        """Log how many were finished, the time it took and the mean rate."""
        self.note()
        took, count = clock(time.monotonic() - self.started), self.done - self.before
        LOGGER.info("%s: %d %s in %s, %s", self.description, count, self.unit, took, rate(self.rate, self.unit))


def rate(per_second: float, unit: str) -> str:
    """Return a rate with about three digits; slow work is given by the minute."""
    if 0 < per_second < 0.1:
        return f"{60 * per_second:.2g} {unit}/min"
    return f"{per_second:.3g} {unit}/s" if per_second < 1000 else f"{per_second:.0f} {unit}/s"


def clock(seconds: float) -> str:
    """Return a duration as hours:minutes:seconds."""
    return str(timedelta(seconds=round(seconds)))

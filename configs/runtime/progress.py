"""Progress of long work, a bar on a terminal and plain log lines elsewhere, and the project's logging.

Only rank 0 prints. Both forms show the count, the rate and the time left; lines come at most every `SECONDS_BETWEEN_LINES`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from configs.runtime.redaction import redact
from configs.runtime.terminal import printable, say

T = TypeVar("T")

SECONDS_BETWEEN_LINES = 10.0
LOGGER = logging.getLogger("draftsmith")


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
    handler.setFormatter(_RedactingFormatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    LOGGER.handlers = [handler]
    LOGGER.setLevel(logging.INFO if is_main_process() else logging.ERROR)
    sys.excepthook = _print_traceback


def track(items: Iterable[T], *, description: str, total: int | None = None, unit: str = "it") -> Iterator[T]:
    """Yield `items` one by one, showing how many are done.

    Args:
        items: what is worked on.
        description: what is being done, e.g. "writing answers".
        total: how many there are; taken from `items` where it has a length, unknown otherwise.
        unit: what one item is called, e.g. "prompts".
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress(description, total, unit) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def progress(description: str, total: int | None, unit: str = "it", done: int = 0) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds a number of finished items to the bar or the log.

    See `track` for the arguments; a `total` of None is unknown. `done` items were finished before, which says nothing of the
    rate.
    """
    if is_main_process() and sys.stderr.isatty():
        with _bar(unit) as bar:
            task = bar.add_task(description, total=total, completed=done)
            yield lambda count: bar.advance(task, count)
        return
    lines = _Lines(description, total, unit, done)
    yield lines.advance
    lines.finish()


class _RedactingFormatter(logging.Formatter):
    """Formats a message without secrets and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return redact(printable(super().format(record)))


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    say("".join(traceback.format_exception(kind, error, trace)).rstrip(), sys.stderr)


class _Lines:
    """Counts finished items and logs the count, the rate and the time left."""

    def __init__(self, description: str, total: int | None, unit: str, done: int) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done = self.before = done
        self.started = self.last_line = time.monotonic()

    def advance(self, count: int) -> None:
        """Add `count` finished items."""
        self.done += count
        now = time.monotonic()
        if now - self.last_line < SECONDS_BETWEEN_LINES or self.done == self.total:
            return
        self.last_line = now
        rate = (self.done - self.before) / (now - self.started)
        if self.total is None:
            LOGGER.info("%s: %d %s, %s", self.description, self.done, self.unit, _rate(rate, self.unit))
            return
        left = _clock((self.total - self.done) / rate) if rate > 0 else "unknown"
        share = 100 * self.done / self.total
        done = f"{self.done}/{self.total} {self.unit} ({share:.0f} %)"
        LOGGER.info("%s: %s, %s, %s left", self.description, done, _rate(rate, self.unit), left)

    def finish(self) -> None:
        """Log how many were finished, the time it took and the mean rate."""
        seconds, count = time.monotonic() - self.started, self.done - self.before
        rate = _rate(count / seconds if seconds > 0 else 0.0, self.unit)
        LOGGER.info("%s: %d %s in %s, %s", self.description, count, self.unit, _clock(seconds), rate)


class _RateColumn(ProgressColumn):
    """Finished items a second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        """Return the rate of the last half minute, of the whole task once it has finished."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else _rate(speed, self.unit))


class _StderrHandler(logging.Handler):
    """Writes to the present `sys.stderr`, which a running bar replaces so that lines appear above it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        print(self.format(record), file=sys.stderr)


def _bar(unit: str) -> Progress:
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _RateColumn(unit), TimeRemainingColumn()]
    return Progress(*columns, console=Console(stderr=True))


def _rate(per_second: float, unit: str) -> str:
    """Return a rate with about three digits; slow work is given by the minute."""
    if 0 < per_second < 0.1:
        return f"{60 * per_second:.2g} {unit}/min"
    return f"{per_second:.3g} {unit}/s" if per_second < 1000 else f"{per_second:.0f} {unit}/s"


def _clock(seconds: float) -> str:
    """Return a duration as hours:minutes:seconds."""
    return str(timedelta(seconds=round(seconds)))

"""Progress of long work, a bar on a terminal and plain log lines elsewhere, and the project's logging.

Only rank 0 prints. Both forms show the count, the rate and the time left; lines come at most every `SECONDS_BETWEEN_LINES`.
Where items differ in size, as texts that are written do, `Tokens` tells rate and time left.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
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
def progress(
    description: str, total: int | None, unit: str = "it", done: int = 0, tokens: Tokens | None = None
) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds a number of finished items to the bar or the log.

    See `track` for the arguments; a `total` of None is unknown. `done` items were finished before, which says nothing of the
    rate. `tokens` of the items, where they are given, tell the rate, the share and the time left.
    """
    if is_main_process() and sys.stderr.isatty():
        with _bar(unit, tokens) as bar:
            task = bar.add_task(description, total=total, completed=done)
            yield lambda count: bar.advance(task, count)
        return
    lines = _Lines(description, total, unit, done, tokens)
    if tokens is not None:
        tokens.on_change = partial(lines.advance, 0)
    yield lines.advance
    lines.finish()


class Tokens:
    """Tokens of texts whose number and longest lengths are known: how many are written, and about how many are left.

    Short texts end first, so the mean of those that have ended is too small while others are under way. A text is taken to fill
    the share of its limit at which as many would have ended by now, had each the same chance to end at every token: all tokens
    written, those of texts under way included, over the limits of the texts that have ended. Texts of several kinds fill
    different shares.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._kinds: dict[str, _Kind] = defaultdict(_Kind)

    def expect(self, limit: float, kind: str = "") -> None:
        """Add texts that have `limit` tokens together at most."""
        self._kinds[kind].limit += limit

    def write(self, count: int, kind: str = "") -> None:
        """Add tokens to the texts under way."""
        self._kinds[kind].written += count
        self.on_change()

    def end(self, limit: float, length: int, kind: str = "") -> None:
        """Note that texts of this limit together have ended, `length` tokens long; 0 for those that are not to be written."""
        self._kinds[kind].ended_limit += limit
        self._kinds[kind].ended_length += length

    @property
    def done(self) -> float:
        """The tokens written."""
        return sum(kind.written for kind in self._kinds.values())

    @property
    def left(self) -> float:
        """The tokens that are still to be written, by estimate; the most they may be before a text has ended."""
        ended = sum(kind.ended_limit for kind in self._kinds.values())
        share = self.done / ended if ended else 1.0  # of the kinds of which none has ended
        return sum(kind.left(share) for kind in self._kinds.values())

    @property
    def share(self) -> float:
        """The part of all that is written."""
        return self.done / (self.done + self.left) if self.done else 0.0

    def pace(self, seconds: float) -> str:
        """Return the rate of the tokens written in so many seconds, and the time left."""
        rate = self.done / seconds if seconds > 0 else 0.0
        return f"{_rate(rate, 'tokens')}, {_left(self.left, rate)}"


@dataclass
class _Kind:
    """Texts of one kind: tokens written, and the limits of all and of those that have ended."""

    limit: float = 0.0
    written: int = 0
    ended_limit: float = 0.0
    ended_length: int = 0

    def left(self, share: float) -> float:
        under_way, open_limit = self.written - self.ended_length, self.limit - self.ended_limit
        share = self.written / self.ended_limit if self.ended_limit else share
        return max(0.0, min(share * open_limit, open_limit - under_way))


class _RedactingFormatter(logging.Formatter):
    """Formats a message without secrets and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return redact(printable(super().format(record)))


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    say("".join(traceback.format_exception(kind, error, trace)).rstrip(), sys.stderr)


class _Lines:
    """Counts finished items and logs the count, the rate and the time left."""

    def __init__(self, description: str, total: int | None, unit: str, done: int, tokens: Tokens | None) -> None:
        self.description, self.total, self.unit, self.tokens = description, total, unit, tokens
        self.done = self.before = done
        self.started = self.last_line = time.monotonic()

    def advance(self, count: int) -> None:
        """Add `count` finished items."""
        self.done += count
        now = time.monotonic()
        if now - self.last_line < SECONDS_BETWEEN_LINES or self.done == self.total:
            return
        self.last_line = now
        seconds = now - self.started
        rate = (self.done - self.before) / seconds
        if self.total is None:
            LOGGER.info("%s: %d %s, %s", self.description, self.done, self.unit, _rate(rate, self.unit))
            return
        if self.tokens is None or not self.tokens.done:
            share, pace = self.done / self.total, f"{_rate(rate, self.unit)}, {_left(self.total - self.done, rate)}"
        else:
            share, pace = self.tokens.share, self.tokens.pace(seconds)
        done = f"{self.done}/{self.total} {self.unit} ({100 * share:.0f} %)"
        LOGGER.info("%s: %s, %s", self.description, done, pace)

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


class _TokensColumn(ProgressColumn):
    """Written tokens a second, and the time left."""

    def __init__(self, tokens: Tokens) -> None:
        super().__init__()
        self.tokens = tokens

    def render(self, task: Task) -> Text:
        """Return both, nothing before a token was written."""
        return Text(self.tokens.pace(task.elapsed or 0.0) if self.tokens.done else "")


class _StderrHandler(logging.Handler):
    """Writes to the present `sys.stderr`, which a running bar replaces so that lines appear above it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        print(self.format(record), file=sys.stderr)


def _bar(unit: str, tokens: Tokens | None) -> Progress:
    pace = [_RateColumn(unit), TimeRemainingColumn()] if tokens is None else [_TokensColumn(tokens)]
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *pace]
    return Progress(*columns, console=Console(stderr=True))


def _rate(per_second: float, unit: str) -> str:
    """Return a rate with about three digits; slow work is given by the minute."""
    if 0 < per_second < 0.1:
        return f"{60 * per_second:.2g} {unit}/min"
    return f"{per_second:.3g} {unit}/s" if per_second < 1000 else f"{per_second:.0f} {unit}/s"


def _left(count: float, rate: float) -> str:
    """Return the time that so much takes at a rate."""
    return f"{_clock(count / rate) if rate > 0 else 'unknown'} left"


def _clock(seconds: float) -> str:
    """Return a duration as hours:minutes:seconds."""
    return str(timedelta(seconds=round(seconds)))

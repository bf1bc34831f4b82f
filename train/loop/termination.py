"""SIGTERM, as a cluster sends it before it takes a machine away: asked to stop, a run ends at its next step with a checkpoint.

The handler only notes the request; the training loop looks at it after each step, all processes together. Before and after
training the signal ends the process as it always does. Either way a shell sees exit code 143.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """Whether this process was asked to stop."""

    made: bool = False

    def note(self, signal_number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        self.made = True


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Note SIGTERM in place of dying from it; a thread that is not the main one cannot, and gets a request never made."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = signal.signal(signal.SIGTERM, request.note)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)

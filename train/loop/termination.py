"""SIGTERM, which a cluster sends before it takes a machine away: the run ends after its next step with a checkpoint.

The handler only notes the request; the training loop checks it in each step, all processes together. Before and after training
the signal ends the process as usual. Either way a shell sees exit code 143.
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
    """Whether SIGTERM has come."""

    made: bool = False

    def note(self, signal_number: int, frame: FrameType | None) -> None:
        self.made = True


@contextmanager
def noting_sigterm() -> Iterator[StopRequest]:
    """Note SIGTERM instead of ending; outside the main thread, where that is impossible, the request is never made."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = signal.signal(signal.SIGTERM, request.note)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)

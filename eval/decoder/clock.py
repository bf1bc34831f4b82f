"""Wall-clock seconds: of decoding a batch by phase (`Clock`), and of a command by part (`Laps`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("prefill", "decode", "draft", "verify", "sample", "measure")


class Clock:
    """Seconds by phase of one batch; a subclass may count something else as well.

    On a GPU the queue is drained at both ends of a phase, so that the phase's work is counted in it.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._on_gpu = device.type == "cuda"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside the `with` block to a phase; phases may be nested."""
        start = self._now()
        yield
        self.seconds[name] += self._now() - start

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


class Laps:
    """Seconds of a command's parts, which follow one another; a part may come again."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def done(self, part: str) -> None:
        """Add the time since the last part ended, or since this object was made, to `part`."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.seconds.items())

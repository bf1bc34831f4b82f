"""Where the seconds went: of decoding a batch by phase, with the joules of what is timed; of a command by part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from eval.decoder.meters import Meter

PHASES = ("prefill", "decode", "draft", "verify", "sample", "measure")
METERED = ("decode", "measure")  # joules are kept for whole decodes, less the measuring within; others are too short to tell


class Clock:
    """Wall-clock seconds by phase. On a GPU the queue is drained at the borders, so that a phase's work is counted in it."""

    def __init__(self, device: torch.device, meter: Meter | None = None) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.joules = None if meter is None else dict.fromkeys(METERED, 0.0)
        self._meter = meter
        self._on_gpu = device.type == "cuda"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the `with` block."""
        start = self._now()
        counters = self._meter.read() if self._meter is not None and name in METERED else None
        yield
        end = self._now()
        self.seconds[name] += end - start
        if self._meter is not None and self.joules is not None and counters is not None:
            self.joules[name] += self._meter.joules_between(counters, self._meter.read())

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


class Laps:
    """Wall-clock seconds of a command's parts, which follow one another; a part may come again."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def done(self, part: str) -> None:
        """Count the time since the last part ended, or since the laps began."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.seconds.items())

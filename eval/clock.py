"""Where the seconds of decoding a batch went, by phase; and the joules of those phases that are timed against each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from eval.meters import Meter

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

"""Where the seconds of decoding a batch went, by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("prefill", "decode", "draft", "verify", "sample", "measure")


class Clock:
    """Wall-clock seconds by phase. On a GPU the queue is drained at the borders, so that a phase's work is counted in it."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._on_gpu = device.type == "cuda"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the `with` block."""
        start = self._now()
        yield
        self.seconds[name] += self._now() - start

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

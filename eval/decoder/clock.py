"""Wall-clock seconds: of decoding a batch by phase (`Clock`), and of a command by part (`Laps`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from heads.device import has_timed_events, synchronize, timed_event

PHASES = ("prefill", "decode", "draft", "verify", "sample", "measure")


class Clock:
    """Seconds by phase of one batch; a subclass may count something else as well.

    At both ends of an outer phase the host waits for the device, so that the phase's work is counted in it. Phases inside it
    are timed by events queued on the device where it has them, and are counted once the outer one has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._device, self._by_events = device, has_timed_events(device)
        self._is_inside = False
        self._spans: list[tuple[str, torch.Event, torch.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside the `with` block to a phase; phases may be nested."""
        if self._is_inside and self._by_events:
            begun = timed_event(self._device)
            yield
            self._spans.append((name, begun, timed_event(self._device)))
            return
        outer, self._is_inside = self._is_inside, True
        start = self._now()
        yield
        self.seconds[name] += self._now() - start
        self._is_inside = outer
        for inner, begun, ended in self._spans:
            self.seconds[inner] += begun.elapsed_time(ended) / 1000
        self._spans.clear()

    def _now(self) -> float:
        synchronize(self._device)
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

"""Where the seconds of a training run go, by part, at next to no cost and without waiting for the device.

Time is charged to the innermost part that is under way, to `other` where there is none, so that the parts add up to the whole.
On a CPU it is the wall clock's, as on devices without timed events. On others an event is queued at each border and read when
the seconds are asked for: it is the time of the device's own queue. docs/running.md says what counts as what. The gradient of
the draft's head is part of `loss`, as `distill.loss.fused` computes it there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch

from heads.device import has_timed_events, timed_event

OTHER = "other"
STEP_PARTS = ("data", "target", "loss", "backward", "optimizer", OTHER)
ASIDE = ("evaluation", "checkpoint")
MOST_MARKS = 10_000  # borders kept before they are turned into seconds

Moment = float | torch.Event


class StepClock:
    """Seconds by part since `start`; before it nothing is counted."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._by_events = device, has_timed_events(device)
        self._part: str | None = None  # under way; None: not started
        self._since: Moment = 0.0
        self._marks: list[tuple[Moment, str]] = []  # the end of a part and its name, one after another
        self._seconds = dict.fromkeys((*STEP_PARTS, *ASIDE), 0.0)

    def start(self) -> None:
        self._since, self._part = self._now(), OTHER

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time the block as `part`, minus nested parts. Evaluation and checkpointing are not split further."""
        outer = self._part
        if outer is None or (outer in ASIDE and part not in ASIDE):
            yield
            return
        self._turn_to(part)
        try:
            yield
        finally:
            self._turn_to(outer)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part since the start."""
        if self._part is not None:
            self._turn_to(self._part)
            self._count()
        return dict(self._seconds)

    def _turn_to(self, part: str) -> None:
        assert self._part is not None
        self._marks.append((self._now(), self._part))
        self._part = part
        if len(self._marks) >= MOST_MARKS:
            self._count()

    def _count(self) -> None:
        if self._marks and not isinstance(last := self._marks[-1][0], float):
            last.synchronize()  # the queue is in order: all before it have come, too
        for moment, part in self._marks:
            self._seconds[part] += _between(self._since, moment)
            self._since = moment
        self._marks.clear()

    def _now(self) -> Moment:
        return timed_event(self._device) if self._by_events else time.perf_counter()


def _between(start: Moment, end: Moment) -> float:
    """Return seconds from one moment to a later one of the same kind, both of which have come."""
    if isinstance(start, float):
        return cast(float, end) - start
    return start.elapsed_time(cast(torch.Event, end)) / 1000

"""What a training measures of its steps: metrics between two reports, and the seconds by part.

Sums and counts are added over processes before any division. Beside the task's metrics stands the cost of the steps: tokens a
second, the share of time by part, utilisation, peak memory. docs/running.md says what counts as what.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor

from configs.schema.training import ScheduleConfig
from heads.device import allocated_peak, gpu_name, has_timed_events, timed_event, upload
from heads.modules.interface import NO_DOCUMENT, Batch

OTHER = "other"
STEP_PARTS = ("data", "target", "loss", "backward", "optimizer", OTHER)
ASIDE = ("evaluation", "checkpoint")
MOST_MARKS = 10_000  # borders kept before they are turned into seconds
Moment = float | torch.Event
SHARE = "time_share_"
# Dense bfloat16, in 10^12 operations a second, of the makers' data sheets; by a part of the device's name, the first that fits.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "MI300X": 1307.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
}


class StepMetrics:
    """Sums and counts of this process since the last report; `peak` None: unknown, and no utilisation is reported."""

    def __init__(self, accelerator: Accelerator, clock: StepClock, flops_per_token: float, peak: float | None) -> None:
        self.accelerator, self.clock, self.flops_per_token, self.peak = accelerator, clock, flops_per_token, peak
        self._clear()

    def add(self, sums: Mapping[str, Tensor], counts: Mapping[str, Tensor] | None = None) -> None:
        """Add sums by metric, over labels or over what `counts` says; between two reports all processes give the same names."""
        for name, value in sums.items():
            self.sums[name] += value.detach()
        for name, value in (counts or {}).items():
            self.counts[name] += value.detach()

    def close_step(self, window: Sequence[Batch], labels: int, norm: Tensor | float | None) -> None:
        """Add a step's micro-batches and labels in this process, and the norm of its gradient."""
        self.labels += labels
        self.tokens += sum(int((batch.on_host.document_ids_BT != NO_DOCUMENT).sum()) for batch in window)
        if norm is not None:
            self.norms.append(norm)

    def report(self) -> dict[str, float]:
        """Return averages since the last report and the cost of the steps, and start anew."""
        names = sorted(self.sums)
        own_labels = torch.full((), float(self.labels), device=self.accelerator.device)
        counts = [self.counts.get(name, own_labels) for name in names]
        table = torch.stack([own_labels, *(self.sums[name] for name in names), *counts])
        labels, *totals = self.accelerator.reduce(table, "sum").tolist()
        pairs = zip(totals[: len(names)], totals[len(names) :], strict=True)
        report = {name: value / max(count, 1) for name, (value, count) in zip(names, pairs, strict=True)}
        norms = [torch.as_tensor(norm, device=table.device) for norm in self.norms]
        report["gradient_norm"] = sum(torch.stack(norms).tolist()) / len(norms) if norms else 0.0
        report |= self._costs(labels)
        self._clear()
        return report

    def _costs(self, labels: float) -> dict[str, float]:
        """Return the cost of the steps since the last report over all processes: sums divided by sums, and peak memory."""
        now, device = self.clock.seconds(), self.accelerator.device
        own_seconds = [now[part] - self.seconds_before[part] for part in STEP_PARTS]
        own = [memory_peak(device), float(self.tokens), *own_seconds]
        rows = self.accelerator.gather(upload(torch.tensor([own]), device)).cpu()
        tokens, *seconds = rows[:, 1:].sum(0).tolist()
        whole = sum(seconds)
        elapsed = whole / len(rows)
        return {
            "labels_per_second": labels / elapsed,
            "tokens_per_second": tokens / elapsed,
            **({} if self.peak is None else {"model_flop_utilization": self.flops_per_token * tokens / (self.peak * whole)}),
            "memory_peak_bytes": rows[:, 0].max().item(),
            **{f"{SHARE}{part}": of_part / whole for part, of_part in zip(STEP_PARTS, seconds, strict=True)},
        }

    def _clear(self) -> None:
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.accelerator.device))
        self.counts: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.accelerator.device))
        self.labels = self.tokens = 0
        self.norms: list[Tensor | float] = []
        self.seconds_before = self.clock.seconds()


def memory_peak(device: torch.device) -> float:
    """Return the most bytes that this process has held: of the device's memory, or the machine's where torch counts none."""
    peak = allocated_peak(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit if peak is None else peak)


def find_peak(device: torch.device, schedule: ScheduleConfig) -> float | None:
    """Return the operations a second of which a device is capable in 16 bits or as the config says; None: not known."""
    if schedule.peak_tflops is not None:
        return schedule.peak_tflops * 1e12
    name = gpu_name(device)
    if name is None or schedule.mixed_precision == "no":
        return None
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)


class StepClock:
    """Seconds by part since `start`, at next to no cost and without waiting for the device.

    Time is charged to the innermost part that is under way, to `other` where there is none, so that the parts add up to the
    whole. On a CPU it is the wall clock's. On devices with timed events one is queued at each border and read when the seconds
    are asked for: it is the time of the device's own queue. The gradient of the draft's head is part of `loss`, as
    `distill.loss.fused` computes it there.
    """

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

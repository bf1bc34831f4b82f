"""The books of a training run: sums and counts between two log lines, added over processes before any division."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from accelerate import Accelerator
from torch import Tensor

from distill.step_clock import STEP_PARTS, StepClock


class Books:
    """What has happened in this process since the last report.

    Args:
        accelerator: adds up over processes.
        clock: says how long the steps took.
    """

    def __init__(self, accelerator: Accelerator, clock: StepClock) -> None:
        self.accelerator, self.clock = accelerator, clock
        self._clear()

    def add(self, sums: Mapping[str, Tensor], counts: Mapping[str, Tensor] | None = None) -> None:
        """Add sums over labels, by metric; `counts` says over how many of anything else a metric of that name was summed.

        In the time between two reports every process must give the same names.
        """
        for name, value in sums.items():
            self.sums[name] += value.detach()
        for name, value in (counts or {}).items():
            self.counts[name] += value.detach()

    def close_step(self, labels: Tensor, norm: Tensor | float | None) -> None:
        """Add a step's labels in this process, and the norm of its gradient."""
        self.labels += labels
        if norm is not None:
            self.norms.append(norm)

    def report(self) -> dict[str, float]:
        """Return averages over labels since the last report, and start anew."""
        names = sorted(self.sums)
        counts = [self.counts.get(name, self.labels) for name in names]
        table = torch.stack([self.labels, *(self.sums[name] for name in names), *counts])
        labels, *totals = self.accelerator.reduce(table, "sum").tolist()
        seconds = self._step_seconds() - self.seconds_before
        pairs = zip(totals[: len(names)], totals[len(names) :], strict=True)
        report = {name: value / max(count, 1) for name, (value, count) in zip(names, pairs, strict=True)}
        report["gradient_norm"] = float(sum(map(float, self.norms)) / max(len(self.norms), 1))
        report["labels_per_second"] = labels / seconds
        self._clear()
        return report

    def _clear(self) -> None:
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.accelerator.device))
        self.counts: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.accelerator.device))
        self.labels = torch.zeros((), device=self.accelerator.device)
        self.norms: list[Tensor | float] = []
        self.seconds_before = self._step_seconds()

    def _step_seconds(self) -> float:
        seconds = self.clock.seconds()
        return sum(seconds[part] for part in STEP_PARTS)

"""Model FLOP utilisation: the floating-point operations of the steps over those that the device could do.

Operations of matrix products and attention are counted where torch dispatches them (`eval.cost.operation_counter`), in the
first micro-batches and then ever more rarely; in between they follow from a micro-batch's shape by least squares,
flops = a BT + b BT^2 + c N, which is exact where products are linear in positions or labels and attention is quadratic.

The utilisation is that of PaLM (2204.02311, appendix B), except that attention counts all pairs computed, masked ones as well,
and that what is computed a second time is counted a second time. Answers that a data policy lets the draft write are left out.
B rows, T positions, N labels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from configs.schema.training import ScheduleConfig
from eval.cost.operation_counter import WorkCounter
from heads.device import synchronize
from heads.modules.interface import Batch

log = logging.getLogger("draftsmith")

ALWAYS_COUNTED = 4  # micro-batches; after them those whose number is a power of two
FIRST_SIZE, LARGEST_SIZE = 256, 8192  # of a square matrix
LONG_ENOUGH = 0.02  # seconds of a product that is no longer dominated by starting it
TRIES = 3


class FlopMeter:
    """Floating-point operations of this process's micro-batches."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._shapes: list[list[float]] = []  # of counted micro-batches: BT, BT^2, N
        self._flops: list[float] = []  # theirs
        self._positions = self._pairs = self._labels = 0  # BT, BT^2 and N since the last look

    @contextmanager
    def micro_batch(self, batch: Batch) -> Iterator[None]:
        """Take the `with` block's operations for those of training on `batch`."""
        B, T = batch.input_ids_BT.shape
        labels = batch.num_labels
        self._positions, self._pairs, self._labels = self._positions + B * T, self._pairs + B * T * T, self._labels + labels
        self._num_seen += 1
        if not _is_counted(self._num_seen):
            yield
            return
        with WorkCounter() as counter:
            yield
        self._shapes.append([B * T, B * T * T, labels])
        self._flops.append(counter.flops)

    def take(self) -> float:
        """Return the operations since the last call."""
        flops = self._fitted([self._positions, self._pairs, self._labels]) if self._positions else 0.0
        self._positions = self._pairs = self._labels = 0
        return flops

    def _fitted(self, shape: list[float]) -> float:
        shapes = np.array(self._shapes)
        units = shapes.max(0).clip(min=1)  # so that no column's size makes the others look like nothing
        per_unit, *_ = np.linalg.lstsq(shapes / units, np.array(self._flops), rcond=None)
        return float(np.array(shape) / units @ per_unit)


def _is_counted(number: int) -> bool:
    """Say whether the micro-batch of this number, from 1, is one whose operations are counted."""
    return number <= ALWAYS_COUNTED or number & (number - 1) == 0


def find_peak(accelerator: Accelerator, schedule: ScheduleConfig) -> float:
    """Return the floating-point operations a second that a process's device can do in the training's precision."""
    if schedule.peak_tflops is not None:
        return schedule.peak_tflops * 1e12
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision, torch.float32)
    peak = measure_peak(accelerator.device, precision)
    log.info(
        "a matrix product in %s reaches %.3g TFLOP/s here; model_flop_utilization is a share of that", precision, peak / 1e12
    )
    return peak


@cache
def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations a second of the best of a few square matrix products; takes a fraction of a second.

    Sizes double until a product is long enough to be timed.
    """
    size, best = FIRST_SIZE, 0.0
    while True:
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        seconds = min(_seconds_of_product(matrix) for _ in range(TRIES))
        best = max(best, 2 * size**3 / seconds)
        if seconds >= LONG_ENOUGH or size >= LARGEST_SIZE:
            return best
        size *= 2


def _seconds_of_product(matrix: Tensor) -> float:
    synchronize(matrix.device)
    start = time.perf_counter()
    torch.mm(matrix, matrix)
    synchronize(matrix.device)
    return time.perf_counter() - start

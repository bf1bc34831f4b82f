"""How much of a training step is spent waiting for its batch: what a benchmark asks of the input pipeline.

The loop's own books need none of this; here a loader is run with any step, so that packing, buckets and workers can be held
against each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader

from distill.batches import Batch, EpochSampler


@dataclass(frozen=True, kw_only=True)
class InputShare:
    """What some steps took.

    first_batch_seconds: until the first batch was there, workers started; not part of the others.
    input_seconds: waiting for the batches after it.
    step_seconds: the steps on them.
    """

    num_steps: int
    first_batch_seconds: float
    input_seconds: float
    step_seconds: float

    @property
    def share(self) -> float:
        """Waiting, of all the time."""
        return self.input_seconds / (self.input_seconds + self.step_seconds)


def measure_input_share(loader: DataLoader[Batch], step: Callable[[Batch], object], num_steps: int) -> InputShare:
    """Run a step on so many batches, epoch after epoch, and time both; the first one is run as well and not counted.

    Args:
        loader: of `distill.batches` or `distill.packing`, prepared by accelerate or not.
        step: what training does with a batch.
        num_steps: counted steps, at least 1.
    """
    batches = _epochs(loader)
    before = time.perf_counter()
    batch = next(batches)
    first_batch_seconds = time.perf_counter() - before
    step(batch)
    input_seconds, step_seconds = 0.0, 0.0
    for _ in range(num_steps):
        _finish(batch)
        started = time.perf_counter()
        batch = next(batches)
        taken = time.perf_counter()
        step(batch)
        _finish(batch)
        input_seconds += taken - started
        step_seconds += time.perf_counter() - taken
    return InputShare(
        num_steps=num_steps,
        first_batch_seconds=first_batch_seconds,
        input_seconds=input_seconds,
        step_seconds=step_seconds,
    )


def _epochs(loader: DataLoader[Batch]) -> Iterator[Batch]:
    """Yield the batches of one epoch after the other."""
    epoch = 0
    while True:
        if isinstance(loader.batch_sampler, EpochSampler):
            loader.batch_sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def _finish(batch: Batch) -> None:
    """Wait until the device has done what was asked of it, as only then the step has taken its time."""
    if batch.input_ids_BT.is_cuda:
        torch.cuda.synchronize(batch.input_ids_BT.device)

"""The batches of each optimiser step, and the target's signals that their loss takes from disk or servers, a batch ahead.

A thread fetches them, so a step does not wait for a disk or a store, and sends both to the device. Order and number of batches
are those without it; an error of the thread is raised where its batch is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice

import torch

from distill.signals import TargetSignals
from heads.modules.interface import Batch

Window = list[Batch]  # the micro-batches of one optimiser step
Signals = TargetSignals | None  # None: to be read when their batch is trained on


def windows(
    batches: Iterator[Batch], size: int, read: Callable[[Batch], Signals], device: torch.device
) -> Iterator[tuple[Window, Iterator[Signals]]]:
    """Yield windows of `size` batches (the last one may be smaller), and an iterator over what `read` returns for each.

    Beside those in use there is at most one of each. An iterator is to be used up before the next window is asked for.
    """
    following: Future[tuple[Window, Signals]] | None = None

    def collect() -> tuple[Window, Signals]:
        window = list(islice(batches, size))
        return window, read(window[0]) if window else None

    def rest(window: Window, signals: Signals) -> Iterator[Signals]:
        nonlocal following
        for batch in window[1:]:
            coming = thread.submit(read, batch)
            yield signals
            signals = coming.result()
        following = thread.submit(collect)
        yield signals

    with ThreadPoolExecutor(1, initializer=partial(_use, device)) as thread:
        window, first = collect()
        while window:
            yield window, rest(window, first)
            window, first = collect() if following is None else following.result()


def _use(device: torch.device) -> None:
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)

"""The batches of each optimiser step, and what a loss reads from disk for them, fetched by a thread one batch ahead.

So a step does not wait for a disk or a store; page-locked memory lets the thread send both to the device without waiting for
it. Order and number of batches are those without it; an error of the thread is raised where its batch is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import torch

from heads.modules.interface import Batch

Read = Callable[[Batch], Any]
Window = list[Batch]  # the micro-batches of one optimiser step


def windows(batches: Iterator[Batch], size: int, read: Read, device: torch.device) -> Iterator[tuple[Window, Iterator[Any]]]:
    """Yield windows of `size` batches (the last one may be smaller), and an iterator over what `read` returns for each.

    Beside those in use there is at most one of each. An iterator is to be used up before the next window is asked for.
    """
    following: Future[tuple[Window, Any]] | None = None

    def collect() -> tuple[Window, Any]:
        window = list(islice(batches, size))
        return window, read(window[0]) if window else None

    def rest(window: Window, first: Any) -> Iterator[Any]:
        nonlocal following
        for batch in window[1:]:
            coming = thread.submit(read, batch)
            yield first
            first = coming.result()
        following = thread.submit(collect)
        yield first

    with ThreadPoolExecutor(1, initializer=partial(_use, device)) as thread:
        window, first = collect()  # by this thread, which is to start the loader's workers: it hears of their end
        while window:
            yield window, rest(window, first)
            window, first = collect() if following is None else following.result()


def _use(device: torch.device) -> None:
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)

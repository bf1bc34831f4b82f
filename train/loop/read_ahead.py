"""The batches of each optimiser step, and what a loss reads from disk for them, fetched by a thread one batch ahead.

Page-locked memory lets the thread send both to the device without waiting for it. On a CPU, and on devices that have none, all
is fetched when it is asked for. Order and number of batches are the same; an error of the thread is raised where its batch is
asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import torch

from heads.device import can_pin
from heads.modules.interface import Batch

Read = Callable[[Batch], Any]
Window = list[Batch]  # the micro-batches of one optimiser step


def windows(batches: Iterator[Batch], size: int, read: Read, device: torch.device) -> Iterator[tuple[Window, Iterator[Any]]]:
    """Yield windows of `size` batches (the last one may be smaller), and an iterator over what `read` returns for each.

    Beside those in use there is at most one of each. An iterator is to be used up before the next window is asked for.
    """
    if can_pin(device):
        yield from _ahead(batches, size, read, device)
        return
    while window := list(islice(batches, size)):
        yield window, map(read, window)


def _ahead(batches: Iterator[Batch], size: int, read: Read, device: torch.device) -> Iterator[tuple[Window, Iterator[Any]]]:
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
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)

"""Windows of batches come in their order; one is fetched beside those in use, and errors keep their sentence."""

import threading

import pytest
import torch

from configs.runtime.errors import InputError
from train.loop.read_ahead import windows

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 3])
def test_batches_come_in_order_each_with_what_was_read_for_it(size):
    found = [(window, list(known)) for window, known in windows(iter(range(7)), size, lambda batch: -batch, CPU)]
    assert [batch for window, _ in found for batch in window] == list(range(7))
    assert all(known == [-batch for batch in window] for window, known in found)
    assert [len(window) for window, _ in found] == ([1] * 7 if size == 1 else [3, 3, 1])


def test_nothing_is_read_but_for_the_batch_in_use_and_the_next():
    seen, threads = [], set()

    def read(batch):
        seen.append(batch)
        threads.add(threading.get_ident())

    for window, known in windows(iter(range(8)), 2, read, CPU):
        for batch, _ in zip(window, known, strict=True):
            assert max(seen) <= batch + 1
    assert seen == list(range(8))
    assert len(threads) == 2  # the first batch is read by the thread that asks


def test_an_error_is_raised_where_the_batch_is_asked_for():
    def read(batch):
        if batch == 3:
            raise InputError("shard 2 is damaged")

    found = windows(iter(range(8)), 2, read, CPU)
    window, known = next(found)
    assert (window, list(known)) == ([0, 1], [None, None])
    window, known = next(found)
    with pytest.raises(InputError, match="shard 2 is damaged"):
        list(known)


def test_the_next_batch_is_read_while_the_step_of_the_one_before_runs():
    begun = threading.Event()

    def read(batch):
        begun.set()

    for (batch,), known in windows(iter(range(4)), 1, read, CPU):
        list(known)
        assert batch == 3 or begun.wait(10)  # now, not when the next one is asked for
        begun.clear()

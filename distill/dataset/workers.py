"""Processes that read and pad batches ahead of training, and what is said when one of them hangs or dies.

torch's `DataLoader` deals batches out to its workers in turn and takes them back in that order, so what training sees does not
depend on their number. It notices a dead worker by its number in the system, and a stuck one by waiting too long, without
knowing which. Here each worker notes which process it is and how many batches it has made, in memory that all share: where the
loader waits in vain the others have done their turns, and the one with the fewest made is the one it waits for.

A run whose worker failed ends, and goes on from its checkpoint when it is started again. Left out on purpose: starting a new
worker in its place; a disk that hangs or a machine out of memory would only take the next one too.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch.utils.data import get_worker_info

from configs.runtime.errors import InputError, first_line

TIMED_OUT = "DataLoader timed out after"
ENDED = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<processes>[\d, ]+)\)\s*(?P<how>.*)")
CAUGHT = "Caught InputError in DataLoader worker process"


class Collate(Protocol):
    """What makes a batch of examples."""

    def __call__(self, examples: Sequence[Any], /) -> Any: ...


class Workers:
    """The worker processes of one loader, as they report themselves.

    Args:
        num_workers: how many, at least 1.
        timeout_seconds: how long training waits for a batch before it gives up the worker that is to bring it.
    """

    def __init__(self, num_workers: int, timeout_seconds: int) -> None:
        self.num_workers, self.timeout_seconds = num_workers, timeout_seconds
        # By worker. Whole numbers of the machine's width, each written by one process: no lock is needed.
        self._processes = multiprocessing.RawArray(ctypes.c_int64, num_workers)
        self._made = multiprocessing.RawArray(ctypes.c_int64, num_workers)

    def loader_settings(self, collate: Collate) -> dict[str, Any]:
        """Return what a `DataLoader` is to be given."""
        return {
            "num_workers": self.num_workers,
            "timeout": self.timeout_seconds,
            "worker_init_fn": self._report,
            "collate_fn": _Counted(collate, self._made),
        }

    @contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Name the worker where one hangs or dies; on any error end all that are left, whatever they are doing.

        Raises:
            RuntimeError: a worker hung or died.
            InputError: a worker met a file that cannot be used.
        """
        try:
            yield
        except BaseException as error:
            failure = self._explain(error)
            self._kill()
            if failure is None:
                raise
            raise failure from error

    def _report(self, number: int) -> None:
        """Note, in a worker, which process it is.

        A machine that is taken away asks every process of the job to end. The worker stays until the run has written its
        checkpoint, and is ended by it.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._processes[number], self._made[number] = os.getpid(), 0

    def _explain(self, error: BaseException) -> Exception | None:
        """Return the error as a sentence, None where it has nothing to do with a worker."""
        said = str(error)
        if isinstance(error, InputError) and said.startswith(CAUGHT):
            return InputError(said.strip().splitlines()[-1].partition("InputError: ")[2])
        if not isinstance(error, RuntimeError):
            return None
        if said.startswith(TIMED_OUT):
            late = min(range(self.num_workers), key=lambda number: self._made[number])
            how = f"did not bring its batch within {self.timeout_seconds} s (schedule.process_timeout_seconds)"
            return self._failure([self._processes[late]], how)
        ended = ENDED.search(first_line(error))
        if ended is None:
            return None
        return self._failure([int(each) for each in ended["processes"].split(",")], ended["how"].strip().rstrip("."))

    def _failure(self, processes: Sequence[int], how: str) -> RuntimeError:
        known = list(self._processes)
        names = [
            f"{known.index(process) + 1} of {self.num_workers} (process {process})"
            if process in known
            else f"process {process}"
            for process in processes
        ]
        return RuntimeError(
            f"data worker {' and '.join(names)} {how}. Nothing is lost that was kept on disk: start the run again to go on "
            "from the last checkpoint; with schedule.loader_workers null no worker is needed"
        )

    def _kill(self) -> None:
        """End the workers that are alive. A stopped one, or one that waits for a disk, would never hear a politer request."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise for each of them
        for child in multiprocessing.active_children():
            if child.pid in set(self._processes):
                child.kill()


class _Counted:
    """Collates, and counts in a worker the batches that it has made."""

    def __init__(self, collate: Collate, made: Any) -> None:
        self.collate, self.made = collate, made

    def __call__(self, examples: Sequence[Any], /) -> Any:
        batch = self.collate(examples)
        info = get_worker_info()
        if info is not None:
            self.made[info.id] += 1
        return batch

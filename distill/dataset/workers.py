"""Settings for the worker processes of torch's `DataLoader`, and error messages that name the worker that hung or died.

The loader takes batches from its workers in turn, so training sees the same batches whatever their number. It reports a dead
worker by its process id, and a hanging one not at all, so each worker records its process id and the number of batches it has
made in shared memory: at a timeout the one with the fewest is the one waited for. No worker is restarted: a disk that hangs or
a machine out of memory would only take the next one too.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.data import get_worker_info

from configs.runtime.errors import InputError, RunFailed, first_line

TIMED_OUT = "DataLoader timed out after"
ENDED = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<processes>[\d, ]+)\)\s*(?P<how>.*)")
CAUGHT = "Caught InputError in DataLoader worker process"

Collate = Callable[[Sequence[Any]], Any]  # makes a batch of examples


class Workers:
    """The worker processes of one loader; training waits `timeout_seconds` for a batch."""

    def __init__(self, num_workers: int, timeout_seconds: int) -> None:
        self.num_workers, self.timeout_seconds = num_workers, timeout_seconds
        # By worker; each element is written by one process, so no lock is needed.
        self._processes = multiprocessing.RawArray(ctypes.c_int64, num_workers)
        self._made = multiprocessing.RawArray(ctypes.c_int64, num_workers)

    def loader_settings(self, collate: Collate) -> dict[str, Any]:
        """Return keyword arguments for the `DataLoader`."""
        return {
            "num_workers": self.num_workers,
            "timeout": self.timeout_seconds,
            "worker_init_fn": self._report,
            "collate_fn": _Counted(collate, self._made),
        }

    @contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Name the worker where one hangs or dies; on any error kill all that are left.

        Raises:
            RunFailed: a worker hung or died.
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
        """Record a worker's process id, in the worker, which ignores SIGTERM.

        A preempted machine sends that to every process, and the run needs its workers until its checkpoint is written.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._processes[number], self._made[number] = os.getpid(), 0

    def _explain(self, error: BaseException) -> Exception | None:
        """Return the error that names the worker, None where it has nothing to do with one."""
        message = str(error)
        if isinstance(error, InputError) and message.startswith(CAUGHT):
            return InputError(message.strip().splitlines()[-1].partition("InputError: ")[2])
        if not isinstance(error, RuntimeError):
            return None
        if message.startswith(TIMED_OUT):
            late = min(range(self.num_workers), key=lambda number: self._made[number])
            how = f"did not bring its batch within {self.timeout_seconds} s (schedule.process_timeout_seconds)"
            return self._failure([self._processes[late]], how)
        ended = ENDED.search(first_line(error))
        if ended is None:
            return None
        return self._failure([int(each) for each in ended["processes"].split(",")], ended["how"].strip().rstrip("."))

    def _failure(self, processes: Sequence[int], how: str) -> RunFailed:
        known = list(self._processes)
        names = [
            f"{known.index(process) + 1} of {self.num_workers} (process {process})"
            if process in known
            else f"process {process}"
            for process in processes
        ]
        return RunFailed(
            f"data worker {' and '.join(names)} {how}. Nothing is lost that was kept on disk: start the run again to go on "
            "from the last checkpoint; with schedule.loader_workers null no worker is needed"
        )

    def _kill(self) -> None:
        """Kill the workers that are alive. A stopped one, or one that waits for a disk, would not react to SIGTERM."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise for each of them
        for child in multiprocessing.active_children():
            if child.pid in set(self._processes):
                child.kill()


class _Counted:
    """Collates, and counts in a worker the batches that it has made."""

    def __init__(self, collate: Collate, made: Any) -> None:
        self.collate, self.made = collate, made

    def __call__(self, examples: Sequence[Any]) -> Any:
        batch = self.collate(examples)
        info = get_worker_info()
        if info is not None:
            self.made[info.id] += 1
        return batch

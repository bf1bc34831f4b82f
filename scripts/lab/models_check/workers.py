"""Processes that check one family after another; one that hangs or dies is replaced, and costs the family a row and no more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import NamedTuple

from configs.runtime.terminal import progress


class Outcome(NamedTuple):
    """How a stage ended: ok, refused, wrong, error, skipped (it is not for this family); and why, in a sentence."""

    stage: str
    result: str
    sentence: str = ""


# Checks a family by its name, and hands over each outcome as it is known, first (stage, "started").
Check = Callable[[str, Callable[[Outcome], None]], None]
STARTED = "started"


class Worker:
    def __init__(self, check: Check) -> None:
        self.check = check
        self._start()

    def run(self, name: str, seconds: float) -> list[Outcome]:
        """Return the outcomes of a family's stages; the last is an error where the process had to be replaced."""
        outcomes: list[Outcome] = []
        running, deadline = "build", time.monotonic() + seconds
        self._connection.send(name)
        while True:
            try:
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    return [*outcomes, self._replaced(running, f"no end after {seconds:g} seconds")]
                outcome: Outcome | None = self._connection.recv()
            except EOFError:
                self._process.join()
                return [*outcomes, self._replaced(running, f"the process ended with code {self._process.exitcode}")]
            if outcome is None:
                return outcomes
            running = outcome.stage
            if outcome.result != STARTED:
                outcomes.append(outcome)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _start(self) -> None:
        context = get_context("spawn")  # no threads or locks of this process
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.check), daemon=True)
        self._process.start()
        theirs.close()
        self._connection.recv()  # it has imported what it needs

    def _replaced(self, stage: str, sentence: str) -> Outcome:
        self.stop()
        self._start()
        return Outcome(stage, "error", sentence)


def check_all(names: Sequence[str], check: Check, *, num_workers: int, seconds: float) -> list[list[Outcome]]:
    idle: SimpleQueue[Worker] = SimpleQueue()
    workers = [Worker(check) for _ in range(num_workers)]
    for worker in workers:
        idle.put(worker)

    def run(name: str) -> list[Outcome]:
        worker = idle.get()
        outcomes = worker.run(name, seconds)
        idle.put(worker)
        advance(1)
        return outcomes

    try:
        with progress("checking families", len(names), "families") as advance, ThreadPoolExecutor(num_workers) as pool:
            return list(pool.map(run, names))
    finally:
        for worker in workers:
            worker.stop()


def _serve(connection: Connection, check: Check) -> None:
    connection.send(None)
    while True:
        check(connection.recv(), connection.send)
        connection.send(None)

"""Many requests to one server: a bounded number under way, each answer kept as it comes, an end where the server is gone.

What is asked and how an answer is kept is the caller's. A request that was given up leaves the others at work; so many in a
row that the server must be gone end the work. Either way nothing that came is lost, and what did not come is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

from configs.runtime.errors import InputError
from distill.server.connection import Connection, GaveUp

Item = TypeVar("Item")
Answer = TypeVar("Answer")

KEPT = "what came before is kept; run it again to go on"


def ask_all(
    connection: Connection,
    items: Mapping[str, Item],
    ask: Callable[[Item], Answer],
    keep: Callable[[str, Answer], None],
    *,
    failures_in_a_row: int,
) -> None:
    """Ask for every item, as many at a time as the server's `concurrency` allows.

    Args:
        connection: the way to the server, over which `ask` goes.
        items: what is asked for, by name.
        ask: called with an item, in any of several threads; what it gives up should say for what (`naming`).
        keep: called with an item's name and its answer, in this thread, in the order in which answers come.
        failures_in_a_row: items given up one after the other that end the work.

    Raises:
        InputError: an item was given up (the others were asked for), too many were in a row, or `ask` or `keep` failed with
            it. Requests under way come to an end, and their answers are kept.
    """
    pool = ThreadPoolExecutor(max_workers=connection.config.concurrency)
    futures = {pool.submit(ask, item): name for name, item in items.items()}
    try:
        given_up = _keep_all(futures, keep, failures_in_a_row)
    except BaseException:
        connection.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        for future, name in futures.items():
            if not future.cancelled() and future.exception() is None:
                keep(name, future.result())
    if given_up:
        raise InputError(f"{len(given_up)} of {len(items)} requests were given up, the first for {given_up[0]}; {KEPT}")


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say what it was that was given up.

    Raises:
        GaveUp: with that before its own sentence.
    """
    try:
        yield
    except GaveUp as error:
        raise GaveUp(f"{what}: {error}") from error


def _keep_all(futures: dict[Future[Answer], str], keep: Callable[[str, Answer], None], failures_in_a_row: int) -> list[GaveUp]:
    """Take answers out of `futures` as they come, and keep them; return what was given up."""
    given_up: list[GaveUp] = []
    in_a_row = 0
    finished = SimpleQueue[Future[Answer]]()  # in the order of time, which `as_completed` does not keep
    for future in list(futures):
        future.add_done_callback(finished.put)
    while futures:
        future = finished.get()
        name = futures.pop(future)
        try:
            answer = future.result()
        except GaveUp as error:
            given_up.append(error)
            in_a_row += 1
            if in_a_row == failures_in_a_row:
                raise InputError(
                    f"{in_a_row} requests in a row (server.failures_in_a_row) were given up, the last for {error}; {KEPT}"
                ) from error
            continue
        in_a_row = 0
        keep(name, answer)
    return given_up

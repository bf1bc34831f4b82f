"""A pool of requests to one server: bounded concurrency, each answer stored as it arrives, an end where the server is gone.

One failed request does not stop the others; too many failures in a row end the work. Either way no answer that arrived is
lost, and the error says how many did not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Generic, TypeVar

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
    """Call `ask` for every item, as many at a time as the server's `concurrency` allows.

    Args:
        connection: the connection that `ask` uses.
        items: by name.
        ask: called in one of several threads; its `GaveUp` should name the item (`naming`).
        keep: called with an item's name and answer, in this thread, in the order in which answers arrive.
        failures_in_a_row: consecutive items given up that end the work.

    Raises:
        InputError: an item was given up (the others were sent), too many were in a row, or `ask` or `keep` raised it. Requests
            under way are finished, and their answers kept.
    """
    under_way = _UnderWay(items, ask, connection.config.concurrency)
    try:
        given_up = _keep_all(under_way, keep, failures_in_a_row)
    except BaseException:
        connection.stop()
        raise
    finally:
        under_way.pool.shutdown(cancel_futures=True)
        for future, name in under_way.names.items():
            if not future.cancelled() and future.exception() is None:
                keep(name, future.result())
    if given_up:
        raise InputError(f"{len(given_up)} of {len(items)} requests were given up, the first for {given_up[0]}; {KEPT}")


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Put `what` in front of the message of a `GaveUp` raised inside."""
    try:
        yield
    except GaveUp as error:
        raise GaveUp(f"{what}: {error}") from error


class _UnderWay(Generic[Item, Answer]):
    """Requests handed to the threads, two for each, so that neither they nor their answers pile up."""

    def __init__(self, items: Mapping[str, Item], ask: Callable[[Item], Answer], concurrency: int) -> None:
        self.pool = ThreadPoolExecutor(max_workers=concurrency)
        self.names: dict[Future[Answer], str] = {}
        self._ask, self._waiting = ask, iter(items.items())
        self._finished = SimpleQueue[Future[Answer]]()  # in the order of time, which `as_completed` does not keep
        for _ in range(2 * concurrency):
            self._submit()

    def _submit(self) -> None:
        found = next(self._waiting, None)
        if found is not None:
            future = self.pool.submit(self._ask, found[1])
            self.names[future] = found[0]
            future.add_done_callback(self._finished.put)

    def next(self) -> tuple[str, Future[Answer]] | None:
        """Return the next one that has ended; None where there is no other."""
        if not self.names:
            return None
        future = self._finished.get()
        self._submit()
        return self.names.pop(future), future


def _keep_all(under_way: _UnderWay[Item, Answer], keep: Callable[[str, Answer], None], failures_in_a_row: int) -> list[GaveUp]:
    """Take answers as they arrive, and keep them; return the failures."""
    given_up: list[GaveUp] = []
    in_a_row = 0
    while (found := under_way.next()) is not None:
        name, future = found
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

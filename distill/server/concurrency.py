"""Many requests to one server: bounded concurrency, each answer kept as it arrives, an end where the server is gone.

One failed request does not stop the others; too many failures in a row end the work. Either way no answer that arrived is
lost, and the error says how many did not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from configs.runtime.errors import InputError
from distill.server.connection import Connection, GaveUp

Item = TypeVar("Item")
Answer = TypeVar("Answer")

KEPT = "the answers so far are kept; rerun the same command to resume"


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
        keep: called with an item's name and answer, in this thread, as answers arrive.
        failures_in_a_row: consecutive items given up that end the work.

    Raises:
        InputError: an item was given up (the others were sent), too many were in a row, or `ask` or `keep` raised it. Requests
            under way are finished, and their answers kept.
    """
    names: dict[Future[Answer], str] = {}
    given_up: list[GaveUp] = []
    in_a_row = 0
    pool = ThreadPoolExecutor(max_workers=connection.config.concurrency)
    try:
        for name, future in _as_they_end(pool, ask, items, names, 2 * connection.config.concurrency):
            error = future.exception()
            if not isinstance(error, GaveUp):
                in_a_row = 0
                keep(name, future.result())
                continue
            given_up.append(error)
            in_a_row += 1
            if in_a_row == failures_in_a_row:
                count = f"{in_a_row} requests in a row (server.failures_in_a_row)"
                raise InputError(f"{count} were given up, the last for {error}; {KEPT}") from error
    except BaseException:
        connection.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        for future, name in names.items():
            if not future.cancelled() and future.exception() is None:
                keep(name, future.result())
    if given_up:
        raise InputError(f"{len(given_up)} of {len(items)} requests were given up, the first for {given_up[0]}; {KEPT}")


def _as_they_end(
    pool: ThreadPoolExecutor,
    ask: Callable[[Item], Answer],
    items: Mapping[str, Item],
    names: dict[Future[Answer], str],
    num_submitted: int,
) -> Iterator[tuple[str, Future[Answer]]]:
    """Yield each item's name and future; only so many are submitted at a time, so that their answers don't pile up.

    `names` holds those that are submitted and not yet yielded.
    """
    waiting = iter(items.items())

    def submit(count: int) -> None:
        names.update({pool.submit(ask, item): name for name, item in islice(waiting, count)})

    submit(num_submitted)
    while names:
        for future in wait(names, return_when=FIRST_COMPLETED).done:
            submit(1)
            yield names.pop(future), future


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Put `what` in front of the message of a `GaveUp` raised inside."""
    try:
        yield
    except GaveUp as error:
        raise GaveUp(f"{what}: {error}") from error

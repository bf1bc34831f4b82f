"""Writing while the work goes on: the one write that may be under way, by a thread. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWrite:
    """At most one write at a time, by a thread that ends with it; the interpreter does not end before it."""

    def __init__(self) -> None:
        self._under_way: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Start a write, once the one before has ended; raises what that one raised."""
        self.wait()
        pool = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._under_way = pool.submit(write)
        pool.shutdown(wait=False)

    def check(self) -> None:
        """Raise what the last write raised, if it has ended; the host does not wait."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def wait(self) -> None:
        """Return once nothing is being written; raises what the last write raised, once."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

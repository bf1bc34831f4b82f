"""Writing while training goes on: copies of states in host memory, and the one write that may be under way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor


def host_copy(value: Any) -> Any:
    """Return a copy of a state dict in host memory; tensors that share their memory, as tied weights do, still share it."""
    return _copied(value, {})


def _copied(value: Any, known: dict[Any, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in known:
            known[key] = value.detach().to("cpu", copy=True)
        return known[key] if value.numel() else value.detach().to("cpu", copy=True)  # one without elements has no place
    if isinstance(value, dict):
        return type(value)((name, _copied(each, known)) for name, each in value.items())
    return type(value)(_copied(each, known) for each in value) if isinstance(value, list | tuple) else value


class BackgroundWrite:
    """At most one write at a time, by a thread that ends with it; the interpreter does not end before it."""

    def __init__(self) -> None:
        self._under_way: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Start a write, once the one before has ended; raises what that one raised."""
        self.wait()
        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
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

"""What a device can do, probed at run time, so that nothing else decides by a device's name; and integers by row on one.

The accelerator is the one of `torch.accelerator`: CUDA (ROCm goes by that name too), XPU, MPS or a backend of another package.
B batch, T columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeVar

import torch
from accelerate.utils import parse_flag_from_env
from torch import Tensor

from configs.runtime.errors import InputError, first_line

log = logging.getLogger("draftsmith")

CPU = torch.device("cpu")
T = TypeVar("T")
# What torch raises where a device or a build of torch has no such thing; MPS answers TypeError for float64.
MISSING = (RuntimeError, NotImplementedError, TypeError, AttributeError, AssertionError)


def choose_device(name: str, *, setting: str = "target.device") -> torch.device:
    """Return the device called `name` in a setting; `auto` is the default one, the CPU under `accelerate launch --cpu`."""
    if name == "auto":
        return CPU if parse_flag_from_env("ACCELERATE_USE_CPU") else default_device()
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # which of them, depends on the backend
        raise InputError(f"{setting}: {name!r} cannot be used: {first_line(error)}") from error


def default_device() -> torch.device:
    """Return this process's accelerator, the CPU where there is none."""
    if not torch.accelerator.is_available():
        return CPU
    return torch.accelerator.current_accelerator() or CPU


def synchronize(device: torch.device) -> None:
    """Wait until the work queued on a device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def gpu_name(device: torch.device) -> str | None:
    """Return what CUDA or ROCm calls a device; None for one of another kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


@contextmanager
def restored_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random states of the CPU and of `device` after the `with` block."""
    if device.type == "cpu":
        with torch.random.fork_rng([]):
            yield
        return
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    with torch.random.fork_rng([index], device_type=device.type):
        yield


def same_device(one: torch.device, other: torch.device) -> bool:
    """Return whether two names mean one device; a name without an index means any of its kind."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


def _asked(device: torch.device, question: Callable[[], T]) -> T | None:
    """Return the answer of an accelerator's backend; None where there is none, and for the CPU."""
    try:
        return None if device.type == "cpu" else question()
    except MISSING:
        return None


@cache
def can_pin(device: torch.device) -> bool:
    """Return whether memory of the host can be page-locked, so that a copy to the device need not be waited for."""
    return bool(_asked(device, lambda: torch.empty(1).pin_memory().is_pinned()))


def to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Return integers as a tensor, int64, on a device."""
    return upload(torch.tensor(values, dtype=torch.int64), device)


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; the host does not wait for the copy where memory can be pinned."""
    if not values.is_cpu or device.type == "cpu":
        return values.to(device)
    pinned = can_pin(device)
    return (values.pin_memory() if pinned else values).to(device, non_blocking=pinned)


def allocated_peak(device: torch.device) -> int | None:
    """Return the most bytes of the device's memory that this process has held; None where torch does not count them."""
    return _asked(device, lambda: int(torch.accelerator.max_memory_allocated(device)))


@cache
def has_timed_events(device: torch.device) -> bool:
    """Return whether events queued on the device tell the time between them."""

    def tell() -> bool:
        start, end = timed_event(device), timed_event(device)
        end.synchronize()
        return start.elapsed_time(end) >= 0

    return bool(_asked(device, tell))


def timed_event(device: torch.device) -> torch.Event:
    """Return an event that is queued on the device now; without a stream it would be queued on the current device."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


@cache
def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 where the device has no float64, as MPS."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except MISSING:
        return torch.float32
    return torch.float64


def keeps_small_tensors_near(device: torch.device) -> bool:
    """Return whether work on small tensors is fast, as they stay in a cache; elsewhere each costs a launch."""
    return device.type == "cpu"


def has_graphs(device: torch.device) -> bool:
    """Return whether torch.compile can record CUDA graphs on the device; peers' CUDA kernels run there too."""
    return device.type == "cuda"


@cache
def has_compiler(device: torch.device) -> bool:
    """Return whether torch.compile makes code for the device: for a CPU in float32, for others in bfloat16, as training runs.

    It takes a C++ compiler for a CPU, Triton and a C compiler for CUDA, and Python's headers for either.
    """
    near = keeps_small_tensors_near(device)
    if not near and not has_graphs(device):
        return False
    try:
        dtype = torch.float32 if near else torch.bfloat16
        torch.compile(torch.neg, fullgraph=True)(torch.ones(2, device=device, dtype=dtype))
    except MISSING as error:
        log.info("nothing is compiled for %s: %s", device, first_line(error))
        return False
    return True


@cache
def has_fused_optimizers(device: torch.device) -> bool:
    """Return whether torch's optimisers update all weights on the device by one kernel."""
    weight = torch.zeros(1, device=device, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    try:
        torch.optim.AdamW([weight], fused=True).step()
    except MISSING:
        return False
    return True


def nvml_uuid(device: torch.device) -> str | None:
    """Return the device's name in NVIDIA's management library; None for one that it does not know."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if is_nvidia else None


def row_tensor(rows: Sequence[Sequence[int]], device: torch.device, fill: int = 0) -> Tensor:
    """Return rows of integers on a device, int64 `[B, T]`, in one copy; shorter rows are filled up at their ends."""
    width = max(map(len, rows), default=0)
    return upload(torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.int64), device)


@dataclass(frozen=True, eq=False)
class RowInts:
    """One integer per batch row: on the host, which plans shapes by it, and on the device, which computes with it."""

    host: list[int]
    tensor_B: Tensor  # int64

    @classmethod
    def full(cls, value: int, num_rows: int, device: torch.device) -> RowInts:
        """Return the same integer for each row, without a copy."""
        return cls([value] * num_rows, torch.full((num_rows,), value, device=device))

    def __len__(self) -> int:
        return len(self.host)

    def __add__(self, number: int) -> RowInts:
        return RowInts([value + number for value in self.host], self.tensor_B + number)

    def minimum(self, other: RowInts) -> RowInts:
        """Return the smaller of two integers, by row."""
        return RowInts(list(map(min, self.host, other.host)), torch.minimum(self.tensor_B, other.tensor_B))


Rows = RowInts | Sequence[int]  # what is not on the device yet is copied there


def on_host(values: Rows) -> Sequence[int]:
    """Return integers by row on the host."""
    return values.host if isinstance(values, RowInts) else values


def row_ints(values: Rows, device: torch.device) -> RowInts:
    """Return integers by row on a device; only those that it does not have are copied."""
    if isinstance(values, RowInts):
        same = same_device(values.tensor_B.device, device)
        return values if same else RowInts(values.host, values.tensor_B.to(device))
    return RowInts(list(values), to_device(values, device))


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...] | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values that are the same in every round as a tensor, which is kept on the device and must not be changed."""
    with torch.inference_mode(mode=False):
        return torch.tensor(values, dtype=dtype, device=device)

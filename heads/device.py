"""What a device can do, probed at run time, so that nothing else decides by a device's name.

The accelerator is the one of `torch.accelerator`: CUDA (ROCm goes by that name too), XPU, MPS or a backend of another package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from accelerate.utils import parse_flag_from_env
from torch import Tensor

from configs.runtime.errors import InputError, first_line

CPU = torch.device("cpu")
# What torch raises where a device or a build of torch has no such thing; MPS answers TypeError for float64.
MISSING = (RuntimeError, NotImplementedError, TypeError, AttributeError, AssertionError)


def choose_device(name: str, *, setting: str = "target.device") -> torch.device:
    """Return the device called `name` in a setting.

    `auto` is this process's accelerator, or the CPU where there is none or `accelerate launch --cpu` asks for it.

    Raises:
        InputError: the name is no device, or the device is not there.
    """
    if name == "auto":
        wants_cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
        return CPU if wants_cpu else default_device()
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
    """Wait until the work queued on `device` is done."""
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


@cache
def can_pin(device: torch.device) -> bool:
    """Return whether memory of the host can be page-locked for the device, so that a copy from it need not be waited for."""
    if device.type == "cpu":
        return False
    try:
        return torch.empty(1).pin_memory().is_pinned()
    except MISSING:
        return False


def to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Return integers as a tensor (int64) on a device; the host does not wait for the copy where that can be."""
    return upload(torch.tensor(values, dtype=torch.int64), device)


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; where it comes from the host, that does not wait for the copy where that can be."""
    if not values.is_cpu or device.type == "cpu":
        return values.to(device)
    pinned = can_pin(device)
    return (values.pin_memory() if pinned else values).to(device, non_blocking=pinned)


def allocated_peak(device: torch.device) -> int | None:
    """Return the most bytes of the device's memory that this process has held; None where torch does not count them."""
    if device.type == "cpu":
        return None
    try:
        return int(torch.accelerator.max_memory_allocated(device))
    except MISSING:
        return None


def free_memory(device: torch.device) -> int | None:
    """Return how many bytes of the device's memory are free, those that torch keeps for itself included; None where it cannot
    tell, and for the CPU, whose memory is the machine's."""
    if device.type == "cpu":
        return None
    try:
        kept = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return int(torch.accelerator.get_memory_info(device)[0]) + kept
    except MISSING:
        return None


@cache
def has_timed_events(device: torch.device) -> bool:
    """Return whether events queued on the device tell the time between them."""
    if device.type == "cpu":
        return False
    try:
        start, end = timed_event(device), timed_event(device)
        end.synchronize()
        return start.elapsed_time(end) >= 0
    except MISSING:
        return False


def timed_event(device: torch.device) -> torch.Event:
    """Return an event that is queued on the device now."""
    event = torch.Event(device, enable_timing=True)
    event.record()
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


def has_nvml(device: torch.device) -> bool:
    """Return whether NVIDIA's management library knows the device."""
    return device.type == "cuda" and torch.version.cuda is not None


def nvml_uuid(device: torch.device) -> str:
    """Return NVIDIA's name of a device that `has_nvml`."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def profiler_activity(device: torch.device) -> str | None:
    """Return torch.profiler's name of the device's kernels; None where it records only what the host does."""
    known = {activity.name.lower() for activity in torch.profiler.supported_activities()}
    return device.type if device.type != "cpu" and device.type in known else None

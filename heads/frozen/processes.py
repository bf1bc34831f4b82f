"""Joining the other processes that `accelerate launch` started, for every command that shares its work among them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch.distributed import DistError

from configs.runtime.errors import InputError, RunFailed, first_line
from configs.schema.target import TargetConfig
from heads.device import choose_device


def join_processes(target: TargetConfig, *, timeout_seconds: int | None = None) -> PartialState:
    """Return this process's place among those that share the work.

    Args:
        target: says which kind of device the work runs on.
        timeout_seconds: how long a process waits for the others before it gives up; None: torch's own limit.

    Raises:
        InputError: DeepSpeed is asked for and not installed.
        RuntimeError: the launcher started several processes and accelerate takes each for the only one.
    """
    settings: dict[str, Any] = {} if timeout_seconds is None else {"timeout": timedelta(seconds=timeout_seconds)}
    on_cpu = choose_device(target.device).type == "cpu"
    if on_cpu:  # DeepSpeed, which accelerate imports wherever it is installed, would warn of what it cannot detect
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    by_deepspeed = on_cpu and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    if by_deepspeed:
        # accelerate has DeepSpeed for accelerators only; told the transport, it takes the CPU for one.
        settings |= {"backend": "gloo"}
        on_cpu = False
    # Without `cpu` accelerate looks for accelerators only, and finds one process where there are several on a CPU.
    try:
        with _without_compiling() if by_deepspeed else nullcontext():
            state = PartialState(cpu=on_cpu, **settings)
    except ImportError as error:
        raise InputError(f"the processes were launched for DeepSpeed, which is not installed: {first_line(error)}") from error
    num_launched = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != num_launched:
        raise RuntimeError(f"{num_launched} processes were launched, but accelerate sees {state.num_processes}")
    return state


@contextmanager
def _without_compiling() -> Iterator[None]:
    """Let DeepSpeed, started on a CPU, do without operators of its own.

    It would compile one for reductions in shared memory when it is first started, and a process that is killed meanwhile
    leaves a lock that all later ones wait for without end. gloo reduces as well.
    """
    if find_spec("deepspeed") is None:
        yield
        return
    import deepspeed.ops

    found = vars(deepspeed.ops).get("__compatible_ops__")  # made at first use
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    try:
        yield
    finally:
        if found is None:
            del deepspeed.ops.__compatible_ops__
        else:
            deepspeed.ops.__compatible_ops__ = found


def wait_patiently(seconds: int) -> None:
    """Return once all processes have come here, which may take longer than other waits; one that ends is noticed at once.

    Raises:
        RuntimeError: see `naming_lost_processes`; or one did not come within `seconds`.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(_patient_group(dist.group.WORLD, seconds))


@cache
def _patient_group(everyone: Any, seconds: int) -> Any:
    """Return a group of the same processes over gloo, whose waits keep no device busy, with a limit of its own."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))


@contextmanager
def naming_lost_processes() -> Iterator[None]:
    """Explain the failure where waiting for another process fails: the transport's own message does not.

    Raises:
        RunFailed: another process has ended, or did not answer for as long as `join_processes` was told to wait.
    """
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, DistError) or "/gloo/" in str(error)):  # gloo raises plain RuntimeErrors
            raise
        raise RunFailed(
            f"another process of this run has ended or does not answer ({first_line(error)}); its own log says why. Nothing "
            "on disk is lost: rerun the same command to resume"
        ) from error

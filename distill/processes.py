"""Joining the other processes that `accelerate launch` started: what every command does that shares its work."""

from __future__ import annotations

import os
from datetime import timedelta

from accelerate import PartialState

from configs.decoding import TargetConfig
from distill.target import choose_device


def join_processes(target: TargetConfig, *, timeout_seconds: int | None = None) -> PartialState:
    """Return this process's place among those that share the work.

    Args:
        target: says which kind of device the work runs on.
        timeout_seconds: how long a process waits for the others before it gives up; None: torch's own limit.

    Raises:
        RuntimeError: the launcher started several processes and accelerate takes each for the only one.
    """
    # Without `cpu` accelerate looks for accelerators only, and finds one process where there are several on a CPU.
    limit = {} if timeout_seconds is None else {"timeout": timedelta(seconds=timeout_seconds)}
    state = PartialState(cpu=choose_device(target.device).type == "cpu", **limit)
    num_launched = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != num_launched:
        raise RuntimeError(f"{num_launched} processes were launched, but accelerate sees {state.num_processes}")
    return state

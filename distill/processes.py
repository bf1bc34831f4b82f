"""Joining the other processes that `accelerate launch` started: what every command does that shares its work."""

from __future__ import annotations

import os

from accelerate import PartialState

from configs.decoding import TargetConfig
from distill.target import choose_device


def join_processes(target: TargetConfig) -> PartialState:
    """Return this process's place among those that share the work.

    Raises:
        RuntimeError: the launcher started several processes and accelerate takes each for the only one.
    """
    # Without `cpu` accelerate looks for accelerators only, and finds one process where there are several on a CPU.
    state = PartialState(cpu=choose_device(target.device).type == "cpu")
    num_launched = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != num_launched:
        raise RuntimeError(f"{num_launched} processes were launched, but accelerate sees {state.num_processes}")
    return state

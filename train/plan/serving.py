"""Servers of the target's states (`target.states`) on some of the accelerators, training on the others: how many of each.

Servers and training work at the same time, since states are requested ahead, so a step takes as long as the slower side. A
server does the target's forward alone, at the utilisation of training, on the accelerators of a node or of a part of one;
several nodes each have a whole server (`scripts/cluster/slurm_states.sbatch`). Training reads the states from the disk that
both share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from configs.schema.commands.planning import HardwareConfig, PlanConfig, PlanHeadsConfig
from train.plan.models import PlannedModels
from train.plan.work import GIGA, TERA, Flops, Times

GIBIBYTE = 2**30
WEIGHTS_SHARE = 0.75  # of a server's memory, for weights; the rest is for keys, values and states of the texts under way


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Servers beside training, on one number of accelerators.

    count, size: servers, and accelerators of each.
    trainers: the other accelerators.
    train_seconds, serve_seconds: of a step, on the trainers without communication, and on the servers.
    """

    count: int
    size: int
    trainers: int
    train_seconds: float
    serve_seconds: float


def serve(
    config: PlanConfig,
    models: PlannedModels,
    flops: Flops,
    times: Times,
    *,
    tokens_per_step: float,
    n: int,
    sending: Callable[[int], float] = lambda trainers: 0.0,
) -> Serving | None:
    """Return the servers with which n accelerators train fastest, where nothing is sent while training computes.

    None: the target does not run in training, a node cannot hold it, or no accelerator is left to train.

    Args:
        flops, times: of a run whose processes run the target.
        tokens_per_step: of one accelerator that trains.
        sending: seconds in which so many trainers send their gradients.
    """
    size = server_size(config.hardware, models, n)
    if size is None or config.data.cache is not None or (not isinstance(config, PlanHeadsConfig) and config.policy.on_policy):
        return None
    hardware = config.hardware
    rate = hardware.machine.tflops * TERA * hardware.utilisation
    read = state_bytes(models) * tokens_per_step / (hardware.machine.disk_gb_per_second * GIGA)
    train = replace(times, products=(flops.total - flops.target_forward) * tokens_per_step / rate, cache=read).total
    ways = [
        Serving(
            count=count,
            size=size,
            trainers=n - count * size,
            train_seconds=train,
            serve_seconds=(n - count * size) * tokens_per_step * flops.target_forward / (count * size * rate),
        )
        for count in range(1, (n - 1) // size + 1)
    ]

    def pace(way: Serving) -> float:
        return way.trainers / max(way.train_seconds + sending(way.trainers), way.serve_seconds)

    return max(ways, key=pace, default=None)


def server_size(hardware: HardwareConfig, models: PlannedModels, n: int) -> int | None:
    """Return how many accelerators of a node one server takes; None where the target does not fit a node's."""
    per_node = min(n, hardware.accelerators_per_node)
    weights = sum(each.numel() * each.element_size() for each in models.target.parameters())
    needed = weights / (hardware.machine.memory_gib * GIBIBYTE * WEIGHTS_SHARE)
    if n > hardware.accelerators_per_node:
        return per_node if needed <= per_node else None
    return next((size for size in range(max(1, math.ceil(needed)), per_node + 1) if per_node % size == 0), None)


def state_bytes(models: PlannedModels) -> int:
    """Return the bytes that a server writes of a token: the taps and the last block's state."""
    width = models.target.config.get_text_config().hidden_size
    return int((1 + len(models.taps or ())) * width * models.target.dtype.itemsize)

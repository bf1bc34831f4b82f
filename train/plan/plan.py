"""A whole plan: what a recipe takes in memory, disk and time. Packed rows count as full."""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.schema.commands.planning import PlanConfig
from train.loop.lineage import accumulating
from train.plan.data import CacheSize, Workload, cache_size, measure_workload, open_dataset
from train.plan.memory import Fit, Memory, memory_of, try_engines
from train.plan.models import PlannedModels, count, frozen_copies, plan_models
from train.plan.work import Flops, Times, flops_of, step_times


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a recipe takes.

    times: of an optimiser step. What processes send each other is left out.
    tokens_per_step: of one process, padding left out.
    conversations_per_step: the same.
    """

    config: PlanConfig
    models: PlannedModels
    work: Workload
    memory: Memory
    cache: CacheSize
    flops: Flops
    times: Times
    fits: list[Fit]
    tokens_per_step: float
    conversations_per_step: float

    @property
    def fitting(self) -> Fit | None:
        """The simplest way that fits."""
        return next((fit for fit in self.fits if fit.complaint is None), None)

    @property
    def num_processes(self) -> int:
        """How many processes train by it: one an accelerator, or one where it spreads the target over a node."""
        spreads = self.fitting is not None and self.fitting.engine.spreads_target
        return 1 if spreads else self.config.hardware.num_accelerators

    @property
    def steps(self) -> int:
        """Optimiser steps of the run."""
        schedule = self.config.schedule
        a_step = self.conversations_per_step * self.num_processes
        return schedule.max_steps or schedule.epochs * math.ceil(self.work.num_conversations / a_step)

    @property
    def tokens_per_second(self) -> float:
        """Of all processes together."""
        return self.num_processes * self.tokens_per_step / self.times.total

    @property
    def hours(self) -> float:
        """Of all training steps; held-out decoding and checkpoints come on top."""
        return self.steps * self.times.total / 3600

    @property
    def checkpoint_bytes(self) -> int:
        """Of a checkpoint's weights and optimiser state on disk."""
        return 12 * count(self.models.draft, trained=True) + 4 * frozen_copies(self.models.draft)


def make_plan(config: PlanConfig) -> Plan:
    """Return the plan of a recipe.

    Raises:
        InputError: target, draft or data are not there, or do not go together.
    """
    config = config.model_copy(update={"schedule": accumulating(config.schedule, config.hardware.num_accelerators)})
    models, dataset = plan_models(config), open_dataset(config)
    work = measure_workload(config, dataset)
    schedule, row_length = config.schedule, config.data.row_length
    a_row = 1.0 if row_length is None else row_length / work.mean_tokens
    conversations = schedule.batch_size * schedule.gradient_accumulation_steps * a_row
    flops, memory = flops_of(config, models, work), memory_of(config, models, work)
    cache = cache_size(config, models, work, dataset)
    tokens = conversations * work.mean_tokens
    per_token = cache.num_bytes / work.num_tokens if config.data.cache is not None else 0.0
    times = step_times(config, models, flops, tokens_per_step=tokens, cache_bytes_per_token=per_token)
    return Plan(
        config=config,
        models=models,
        work=work,
        memory=memory,
        cache=cache,
        flops=flops,
        times=times,
        fits=try_engines(config, models, memory),
        tokens_per_step=tokens,
        conversations_per_step=conversations,
    )

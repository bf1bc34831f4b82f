"""A whole plan: what a recipe takes in memory, disk and time. Packed rows count as full."""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.schema.commands.planning import PlanConfig
from train.loop.lineage import accumulating
from train.plan.data import CacheSize, Workload, cache_size, measure_workload, open_dataset
from train.plan.memory import Fit, Memory, Sharing, memory_of, try_engines
from train.plan.models import PlannedModels, plan_models
from train.plan.scaling import (
    DDP,
    ONE_A_NODE,
    REPLICATED,
    SERVED,
    SHARED,
    SIZES,
    SPLIT,
    SPREAD,
    ZERO2,
    Scaled,
    gradients_sent,
    scale,
)
from train.plan.serving import Serving, serve
from train.plan.work import Flops, Times, flops_of, step_times


@dataclass(frozen=True, kw_only=True)
class PlannedWay:
    """A way that fits, and the run by it.

    row: of the scaling table.
    steps, hours: of the training steps; held-out decoding and checkpoints come on top.
    """

    fit: Fit
    row: Scaled
    steps: int
    hours: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a recipe takes.

    tokens_per_step: of one accelerator, padding left out.
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
    def ways(self) -> list[PlannedWay]:
        """All ways that fit, from the simplest, with nothing sent while anything is computed."""
        rows = {(row.engine, row.target): row for row in self._rows(self.config.hardware.num_accelerators, self.fits)}
        found = [(fit, rows[_kind(fit)], self._steps(fit)) for fit in self.fits if fit.complaint is None]
        return [
            PlannedWay(fit=fit, row=row, steps=steps, hours=steps * row.step_seconds_high / 3600) for fit, row, steps in found
        ]

    @property
    def fastest(self) -> PlannedWay | None:
        """The way that trains on most tokens a second; of several the simplest."""
        return max(self.ways, key=lambda way: way.row.tokens_per_second_low, default=None)

    @property
    def steps(self) -> int:
        """Optimiser steps of the run by the simplest way that fits."""
        return self._steps(self.fitting)

    @property
    def step_seconds(self) -> float:
        """Of an optimiser step on all accelerators by the simplest way that fits (DDP where none does), with nothing sent
        while anything is computed.
        """
        n = self.config.hardware.num_accelerators
        if n == 1:
            return self.times.total
        wanted = (DDP, REPLICATED) if self.fitting is None else _kind(self.fitting)
        rows = self._rows(n, self.fits)
        return next(row.step_seconds_high for row in rows if (row.engine, row.target) == wanted)

    @property
    def tokens_per_second(self) -> float:
        """Of all processes together."""
        return _num_processes(self.config, self.fitting) * self.tokens_per_step / self.step_seconds

    @property
    def hours(self) -> float:
        """Of all training steps; held-out decoding and checkpoints come on top."""
        return self.steps * self.step_seconds / 3600

    def _steps(self, fit: Fit | None) -> int:
        schedule = self.config.schedule
        a_step = self.conversations_per_step * _num_processes(self.config, fit)
        return schedule.max_steps or schedule.epochs * math.ceil(self.work.num_conversations / a_step)

    def serving(self, num_accelerators: int) -> Serving | None:
        """Return the servers of the target's states that this number of accelerators is best divided by."""
        return _serving(self.config, self.models, self.flops, self.times, self.tokens_per_step, num_accelerators)

    def scaled(self, sizes: tuple[int, ...] = SIZES) -> list[Scaled]:
        """Return the step on other numbers of accelerators, of the ways that fit there; see `train.plan.scaling`."""
        rows = []
        for n in sizes:
            hardware = self.config.hardware.model_copy(update={"num_accelerators": n})
            config = self.config.model_copy(update={"hardware": hardware})
            served = _served(self.serving(n))
            fits = [fit for fit in try_engines(config, self.models, self.memory, served) if fit.complaint is None]
            possible = {_kind(fit) for fit in fits}
            rows += [row for row in self._rows(n, fits) if (row.engine, row.target) in possible]
        return rows

    def _rows(self, num_accelerators: int, fits: list[Fit]) -> list[Scaled]:
        groups = [fit.engine for fit in fits if fit.engine.group > 1]
        tokens = self.tokens_per_step
        serving = self.serving(num_accelerators)
        return scale(
            self.config,
            self.models,
            self.times,
            tokens_per_step=tokens,
            n=num_accelerators,
            groups=groups,
            serving=serving,
        )


def _serving(
    config: PlanConfig, models: PlannedModels, flops: Flops, times: Times, tokens_per_step: float, n: int
) -> Serving | None:
    hardware = config.hardware.model_copy(update={"num_accelerators": n})

    def sending(trainers: int) -> float:
        return gradients_sent(models, hardware, trainers)[1]

    return serve(config, models, flops, times, tokens_per_step=tokens_per_step, n=n, sending=sending)


def _served(serving: Serving | None) -> list[Sharing]:
    """Return the way of sharing that these servers are."""
    if serving is None:
        return []
    return [Sharing(recipe="ddp_gpus", on_cpu="ddp_cpu", servers=serving.count, server_size=serving.size)]


def _num_processes(config: PlanConfig, fit: Fit | None) -> int:
    """Return how many processes work side by side: one an accelerator, or one a node where they share a spread target."""
    n, per_node = config.hardware.num_accelerators, config.hardware.accelerators_per_node
    if fit is None:
        return n
    return math.ceil(n / per_node) if fit.engine.spreads_target else fit.engine.trainers(n)


def _kind(fit: Fit) -> tuple[str, str]:
    """Return which row of the scaling table a way of sharing is."""
    if fit.engine.spreads_target:
        return ONE_A_NODE, SPREAD
    if fit.engine.servers:
        return DDP, SERVED.format(count=fit.engine.servers, size=fit.engine.server_size)
    if fit.engine.group > 1:
        return DDP, SHARED.format(kind=fit.engine.kind, group=fit.engine.group)
    return {2: ZERO2, 3: SPLIT}.get(fit.engine.stage, DDP), REPLICATED


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
    serving = _serving(config, models, flops, times, tokens, config.hardware.num_accelerators)
    return Plan(
        config=config,
        models=models,
        work=work,
        memory=memory,
        cache=cache,
        flops=flops,
        times=times,
        fits=try_engines(config, models, memory, _served(serving)),
        tokens_per_step=tokens,
        conversations_per_step=conversations,
    )

"""A whole plan: what a recipe takes in memory, disk and time. Packed rows count as full."""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.schema.commands.planning import PlanConfig
from train.plan.data import CacheSize, Workload, cache_size, measure_workload, open_dataset
from train.plan.memory import Fit, Memory, memory_of, try_engines
from train.plan.models import PlannedModels, plan_models
from train.plan.scaling import DDP, ONE_A_NODE, REPLICATED, SHARED, SIZES, SPLIT, SPREAD, ZERO2, Scaled, scale
from train.plan.work import Flops, Times, flops_of, step_times


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a recipe takes.

    tokens_per_step: of one accelerator, padding left out.
    steps: optimiser steps of the run.
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
    steps: int

    @property
    def fitting(self) -> Fit | None:
        """The simplest way that fits."""
        return _simplest(self.fits)

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

    def scaled(self, sizes: tuple[int, ...] = SIZES) -> list[Scaled]:
        """Return the step on other numbers of accelerators, of the ways that fit there; see `train.plan.scaling`."""
        rows = []
        for n in sizes:
            hardware = self.config.hardware.model_copy(update={"num_accelerators": n})
            config = self.config.model_copy(update={"hardware": hardware})
            fits = [fit for fit in try_engines(config, self.models, self.memory) if fit.complaint is None]
            possible = {_kind(fit) for fit in fits}
            rows += [row for row in self._rows(n, fits) if (row.engine, row.target) in possible]
        return rows

    def _rows(self, num_accelerators: int, fits: list[Fit]) -> list[Scaled]:
        groups = [fit.engine for fit in fits if fit.engine.group > 1]
        tokens = self.tokens_per_step
        return scale(self.config, self.models, self.times, tokens_per_step=tokens, n=num_accelerators, groups=groups)


def _simplest(fits: list[Fit]) -> Fit | None:
    return next((fit for fit in fits if fit.complaint is None), None)


def _num_processes(config: PlanConfig, fit: Fit | None) -> int:
    """Return how many processes work side by side: one an accelerator, or one a node where they share a spread target."""
    n, per_node = config.hardware.num_accelerators, config.hardware.accelerators_per_node
    return math.ceil(n / per_node) if fit is not None and fit.engine.spreads_target else n


def _kind(fit: Fit) -> tuple[str, str]:
    """Return which row of the scaling table a way of sharing is."""
    if fit.engine.spreads_target:
        return ONE_A_NODE, SPREAD
    if fit.engine.group > 1:
        return DDP, SHARED.format(kind=fit.engine.kind, group=fit.engine.group)
    return {2: ZERO2, 3: SPLIT}.get(fit.engine.stage, DDP), REPLICATED


def make_plan(config: PlanConfig) -> Plan:
    """Return the plan of a recipe.

    Raises:
        InputError: target, draft or data are not there, or do not go together.
    """
    models, dataset = plan_models(config), open_dataset(config)
    work = measure_workload(config, dataset)
    schedule, row_length = config.schedule, config.data.row_length
    a_row = 1.0 if row_length is None else row_length / work.mean_tokens
    conversations = schedule.batch_size * schedule.gradient_accumulation_steps * a_row
    flops, memory = flops_of(config, models, work), memory_of(config, models, work)
    cache = cache_size(config, models, work, dataset)
    tokens = conversations * work.mean_tokens
    per_token = cache.num_bytes / work.num_tokens if config.data.cache is not None else 0.0
    fits = try_engines(config, models, memory)
    steps_per_epoch = math.ceil(work.num_conversations / (conversations * _num_processes(config, _simplest(fits))))
    return Plan(
        config=config,
        models=models,
        work=work,
        memory=memory,
        cache=cache,
        flops=flops,
        times=step_times(config, models, flops, tokens_per_step=tokens, cache_bytes_per_token=per_token),
        fits=fits,
        tokens_per_step=tokens,
        steps=schedule.max_steps or schedule.epochs * steps_per_epoch,
    )

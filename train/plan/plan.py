"""A whole plan: what a recipe takes in memory, disk and time.

A row of W logits of a D-wide state costs 2 W D forward, as much again for its gradient, and for the weights' where they are
trained. The optimiser's work is counted in bytes. Norms, softmax, the divergence's elementwise work and what processes send
each other are left out. Packed rows count as full.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ValidationError
from transformers import PreTrainedModel

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import read_object
from configs.schema.commands.planning import HardwareConfig, PlanConfig, PlanHeadsConfig, WorkloadConfig
from configs.schema.data import CacheConfig
from distill.cache.writer import layout_of
from distill.dataset.batches import ConversationDataset
from distill.dataset.conversations import open_conversations
from heads.frozen.hidden_states import num_blocks
from heads.modules.layers import shape_like
from train.loop.lineage import accumulating
from train.plan.memory import Fit, Memory, memory_of, try_engines
from train.plan.models import (
    PlannedModels,
    active_weights,
    count,
    draft_columns,
    draft_work,
    frozen_copies,
    plan_models,
    target_columns,
)

# AdamW reads weight, gradient and two averages, and writes all but the gradient: seven float32 numbers.
OPTIMIZER_BYTES_MOVED = 28


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The training data as a plan sees it."""

    num_conversations: int  # in an epoch
    mean_tokens: float  # of a conversation
    label_share: float  # of those tokens


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs a token of the batch, by part; of logits and draft forward and backward together."""

    target_forward: float
    target_logits: float
    draft: float
    draft_logits: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one optimiser step on each accelerator, none of its parts at the same time as another."""

    products: float
    optimizer: float
    cache: float

    @property
    def total(self) -> float:
        return self.products + self.optimizer + self.cache


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a recipe takes; tokens and conversations of a step are those of one process, without padding."""

    config: PlanConfig
    models: PlannedModels
    work: Workload
    memory: Memory
    cache_row_bytes: int
    cache_rows: int
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
    """Return the plan of a recipe; an InputError says where target, draft or data are not there, or do not go together."""
    schedule = accumulating(config.schedule, config.hardware.num_accelerators)
    config = config.model_copy(update={"schedule": schedule, "hardware": with_measured(config.hardware)})
    models = plan_models(config)
    config = models.config
    work = _measure_workload(config)
    schedule, row_length, machine = config.schedule, config.data.row_length, config.hardware.machine
    a_row = 1.0 if row_length is None else row_length / work.mean_tokens
    conversations = schedule.batch_size * schedule.gradient_accumulation_steps * a_row
    tokens = conversations * work.mean_tokens
    flops, memory = flops_of(config, models, work), memory_of(config, models, work.label_share)
    # Of the cache that the recipe can learn from, in the cache's default dtype.
    taps, max_length = sorted(models.taps or ()), config.data.max_length
    cache = CacheConfig(target=config.target, data=config.data.train, max_length=max_length, taps=taps)
    layout = layout_of(cache, models.target)
    rows = round(work.num_conversations * work.mean_tokens)
    read = 0.0 if config.data.cache is None else layout.bytes_per_row * rows * conversations / work.num_conversations
    times = Times(
        products=flops.total * tokens / (machine.tflops * 1e12 * config.hardware.utilisation),
        optimizer=count(models.draft, trained=True) * OPTIMIZER_BYTES_MOVED / (machine.memory_gb_per_second * 1e9),
        cache=read / (machine.disk_gb_per_second * 1e9),
    )
    return Plan(
        config=config,
        models=models,
        work=work,
        memory=memory,
        cache_row_bytes=layout.bytes_per_row,
        cache_rows=rows,
        flops=flops,
        times=times,
        fits=try_engines(config, models, memory),
        tokens_per_step=tokens,
        conversations_per_step=conversations,
    )


def with_measured(hardware: HardwareConfig) -> HardwareConfig:
    """Return the machine with what `hardware.measured` says of it, where the config gives no number itself."""
    if hardware.measured is None:
        return hardware
    path = Path(hardware.measured)
    measured = read_object(path, "measurement of a machine").get("measured")
    known = set(HardwareConfig.model_fields) - hardware.model_fields_set
    numbers = {name: value for name, value in measured.items() if name in known} if isinstance(measured, dict) else {}
    try:
        return HardwareConfig.model_validate(hardware.model_dump(exclude_unset=True) | numbers)
    except ValidationError as error:
        raise InputError(f"hardware.measured: {path} is no gpu-check.json: {first_line(error)}") from error


def flops_of(config: PlanConfig, models: PlannedModels, work: Workload) -> Flops:
    """Return the FLOPs of training, a token."""
    step = draft_work(config, models, length=work.mean_tokens, label_share=work.label_share)
    shape, cached = shape_like(models.target), config.data.cache is not None
    attention = 4.0 * work.mean_tokens * shape.num_heads * shape.head_width * num_blocks(models.target)
    columns, vocab_size = target_columns(config, models), models.target.config.get_text_config().vocab_size
    # Those that weigh drafts by their acceptance compare each with the target once before, without a gradient.
    comparisons = 2 if getattr(models.draft, "weighs_by_acceptance", False) else 1
    target_logits = 2.0 * comparisons * min(step.judged_rows, work.label_share) * shape.width * columns
    if columns < vocab_size and not cached:  # the sums over the whole vocabulary, once a position
        target_logits += 2.0 * work.label_share * shape.width * vocab_size
    if isinstance(config, PlanHeadsConfig):
        trains_head = config.head.train_head
    else:
        assert isinstance(models.draft, PreTrainedModel)
        trains_head = any(each.requires_grad for each in models.draft.get_output_embeddings().parameters())
    a_logit = ((6.0 if trains_head else 4.0) + 2.0 * (comparisons - 1)) * models.draft_width
    return Flops(
        target_forward=0.0 if cached else 2.0 * active_weights(models.target) + attention,
        target_logits=target_logits,
        draft=3 * step.forward_flops,
        draft_logits=step.judged_rows * draft_columns(config, models) * a_logit,
    )


def _measure_workload(config: PlanConfig) -> Workload:
    """Return the amount of data of an epoch; the config's section workload takes precedence over the data."""
    given = {name: value for name, value in config.workload.model_dump().items() if value is not None}
    train, max_length = Path(config.data.train), config.data.max_length
    if len(given) < len(WorkloadConfig.model_fields):
        if not train.is_file():
            missing = ", ".join(f"workload.{name}" for name in WorkloadConfig.model_fields if name not in given)
            raise InputError(f"data.train: {train} does not exist; make it, or give {missing}")
        dataset = ConversationDataset(open_conversations(train), max_length, config.data.num_conversations)
        num_tokens = int(dataset.lengths.sum())
        means = {"mean_tokens": num_tokens / len(dataset), "label_share": dataset.num_labels / num_tokens}
        given = {"num_conversations": len(dataset)} | means | given
    return Workload(**given | {"mean_tokens": min(given["mean_tokens"], max_length)})

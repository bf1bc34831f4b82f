"""The distillation benchmark's training part: optimiser steps online, from a cache, and by TRL's trainer, on the same batches.

A step is forward of target and draft, loss, backward, clipping and AdamW; no data loading, and nothing rewritten where the
recipe's data policy would. Online and cached do the recipe as it stands. Beside TRL all sides see the same conversations and
train the same weights in the same precision, and ours counts three times:

- the same work: all of the vocabulary, forward KL, and logits at every real token, because TRL computes them there;
- the same loss: logits before labels only, as no other position has a say in the loss, so that value and gradient are TRL's;
- our default: the recipe as it stands, with its divergence and, where it has one, its reduced draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed

from configs.runtime.files import sha256_of, write_text
from configs.schema.data import CacheConfig
from configs.schema.training import DistillConfig, LossConfig
from distill.cache.reader import TargetCache, check_fits, open_cache
from distill.cache.writer import CacheJob
from distill.dataset.batches import ConversationDataset, make_loader
from distill.dataset.conversations import Conversation
from distill.student.init import initial_draft
from eval.stats.bootstrap import Interval
from heads.frozen.loading import Target
from heads.modules.interface import NO_DOCUMENT, Batch
from scripts.lab.bench.peers.trl_gkd import GkdPeer, trl_is_installed
from scripts.lab.bench.turns import SideTurns, pooled_rate, speed_ratio, take_turns
from scripts.lab.settings import BenchDistillConfig
from train.loop.engines import make_optimizer
from train.tasks.draft import DraftTask

ONLINE, CACHED = "online", "cached"
GKD, SAME_WORK, SAME_LOSS, DEFAULT = "trl_gkd", "ours, the same work", "ours, the same loss", "ours, our default"
WARMUP_STEPS = 1  # done by `take_turns` before the clock runs


@dataclass(frozen=True, kw_only=True)
class DistillSetup:
    config: BenchDistillConfig
    training: DistillConfig
    target: Target
    train: Sequence[Conversation]
    held_out: Sequence[Conversation]
    accelerator: Accelerator
    scratch: Path

    def make_task(self, training: DistillConfig, cache: TargetCache | None = None) -> DraftTask:
        """Return the task of a recipe with its draft untrained; the same recipe gives the same weights."""
        set_seed(training.schedule.seed)
        return DraftTask(training, self.target, self.train, self.held_out, self.accelerator, cache)


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """One optimiser step of a side: tokens of the batch without padding, and the loss before it, per label."""

    num_tokens: int
    loss: float


Turns = dict[str, SideTurns[TrainingStep]]


class DraftTrainer:
    def __init__(self, setup: DistillSetup, task: DraftTask) -> None:
        self.accelerator, self.task = setup.accelerator, task
        self.max_grad_norm = setup.training.optimizer.max_grad_norm
        num_steps = setup.config.num_batches + WARMUP_STEPS
        optimizer, self.scheduler = make_optimizer(task.module, setup.training.optimizer, num_steps)
        self.module, self.optimizer = setup.accelerator.prepare(task.module, optimizer)

    def step(self, batch: Batch) -> float:
        num_labels = batch.loss_mask_BT[:, 1:].sum().clamp(min=1)
        with self.accelerator.autocast():
            outcome = self.task.loss(self.module, batch, self.task.source.read(batch))
            loss = outcome.loss / num_labels
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()


def compare_cached(setup: DistillSetup) -> Turns:
    """Train from a cache of the target's hidden states, made beforehand and untimed, and with the target running, in turns."""
    batch_size = setup.training.schedule.batch_size
    rows = setup.train[: setup.config.num_batches * batch_size]
    dataset = ConversationDataset(rows, setup.training.data.max_length)
    cache = make_cache_of(setup, rows)
    check_fits(cache, dataset, setup.training)
    sides = {
        ONLINE: DraftTrainer(setup, setup.make_task(setup.training)).step,
        CACHED: DraftTrainer(setup, setup.make_task(setup.training, cache)).step,
    }
    return _in_turns(setup, sides, dataset, batch_size, "training, cached and online")


def compare_with_trl(setup: DistillSetup) -> Turns:
    """Train by TRL's trainer and three times by ours, in turns (see the module's docstring); without TRL, nothing."""
    if not trl_is_installed():
        return {}
    student = setup.training.student.model_copy(update={"draft_vocab_size": None})
    loss = LossConfig(divergence="forward_kl", chunk_size=setup.training.loss.chunk_size)
    plain = setup.training.model_copy(update={"student": student, "loss": loss})
    set_seed(plain.schedule.seed)
    draft = initial_draft(student, setup.target)
    peer = GkdPeer(setup.target, draft, plain.optimizer, plain.schedule.mixed_precision, setup.scratch / "trl")
    same_work = DraftTrainer(setup, setup.make_task(plain))
    sides = {
        GKD: peer.step,
        SAME_WORK: lambda batch: same_work.step(every_token_a_label(batch)),
        SAME_LOSS: DraftTrainer(setup, setup.make_task(plain)).step,
        DEFAULT: DraftTrainer(setup, setup.make_task(setup.training)).step,
    }
    batch_size = setup.config.trl_batch_size
    dataset = ConversationDataset(setup.train[: setup.config.num_batches * batch_size], plain.data.max_length)
    return _in_turns(setup, sides, dataset, batch_size, "training, beside TRL")


def every_token_a_label(batch: Batch) -> Batch:
    """Return the batch with all its real tokens as labels but the first of each row, which nothing predicts."""
    mask_BT = batch.document_ids_BT != NO_DOCUMENT
    mask_BT[:, 0] = False
    return batch._replace(loss_mask_BT=mask_BT)


def training_rows(setup: DistillSetup, cached: Turns, beside_trl: Turns) -> list[dict[str, Any]]:
    sizes = ((cached, setup.training.schedule.batch_size), (beside_trl, setup.config.trl_batch_size))
    return [
        {
            "training": name,
            "batch_size": batch_size,
            "steps": len(cases),
            "tokens_per_second": pooled_rate(cases, _tokens),
            "steps_per_second": pooled_rate(cases, _one),
        }
        for turns, batch_size in sizes
        for name, cases in turns.items()
    ]


def training_ratios(cached: Turns, beside_trl: Turns, samples: int) -> dict[str, Interval]:
    """Return the speed ratios, above 1 where ours (the cached) is faster; those to TRL where measured."""
    ratios = {"cached_speed_vs_online": speed_ratio(cached[CACHED], cached[ONLINE], _one, samples=samples)}
    if beside_trl:
        against = partial(speed_ratio, theirs=beside_trl[GKD], amount=_tokens, samples=samples)
        ratios["tokens_per_second_vs_trl_gkd"] = against(beside_trl[SAME_WORK])
        ratios["same_loss_tokens_per_second_vs_trl_gkd"] = against(beside_trl[SAME_LOSS])
        ratios["default_tokens_per_second_vs_trl_gkd"] = against(beside_trl[DEFAULT])
    return ratios


def make_cache_of(setup: DistillSetup, rows: Sequence[Conversation]) -> TargetCache:
    data = setup.scratch / "cached.jsonl"
    write_text(data, "".join(row.to_line() for row in rows))
    config = CacheConfig(
        target=setup.training.target,
        data=str(data),
        max_length=setup.training.data.max_length,
        dtype=setup.training.target.dtype,
        output=str(setup.scratch / "cache"),
    )
    job = CacheJob(target=setup.target, conversations=rows, config=config, data_sha256=sha256_of(data))
    job.prepare()
    job.work(rank=0, num_processes=1)
    job.finish()
    return open_cache(setup.scratch / "cache", data, setup.target)


def _in_turns(
    setup: DistillSetup,
    sides: Mapping[str, Callable[[Batch], float]],
    dataset: ConversationDataset,
    batch_size: int,
    description: str,
) -> Turns:
    """Let every side take a step on every batch, timed until the loss is on the CPU."""
    loader = make_loader(dataset, batch_size, seed=setup.training.schedule.seed)
    batches = [batch.to(setup.target.device) for batch in islice(loader, setup.config.num_batches)]

    def timed(step: Callable[[Batch], float], batch: Batch, repeat: int) -> TrainingStep:
        return TrainingStep(num_tokens=int((batch.document_ids_BT != NO_DOCUMENT).sum()), loss=step(batch))

    timed_sides = {name: partial(timed, step) for name, step in sides.items()}
    return take_turns(timed_sides, batches, 1, description=description, unit="batches")


def _tokens(step: TrainingStep) -> float:
    return step.num_tokens


def _one(step: TrainingStep) -> float:
    return 1.0

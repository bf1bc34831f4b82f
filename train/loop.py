"""The one training loop: batch, loss, backward, clip, step; then log?, evaluate?, checkpoint?

It knows neither drafts nor targets. A `Task` brings the module, the loss of a batch, the score on held-out prompts and the
way to save what was trained; the loop brings accelerate, the schedule, the books, the history and the checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from configs.learning import OptimizerConfig
from configs.schema import ScheduleConfig
from distill.batches import Batch
from train.books import Books
from train.checkpoints import Progress, list_checkpoints, load_checkpoint, save_checkpoint
from train.history import History, explain_gap

log = logging.getLogger("draftsmith")


@dataclass(frozen=True, kw_only=True)
class BatchLoss:
    """The loss of one micro-batch, already divided by the labels of the whole step, and sums for the books.

    Args:
        loss: scalar to go backward from.
        sums: metric name -> sum over this batch's labels; the loop adds them up and divides once by all labels.
        counts: what to divide by in place of the labels, for metrics that are sums over something else.
    """

    loss: Tensor
    sums: Mapping[str, Tensor]
    counts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepPlace:
    """Where in the run an optimiser step lies."""

    step: int  # optimiser steps done before it
    num_steps: int  # of the whole run


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The micro-batches of an optimiser step as they are trained on, and sums over their labels for the books."""

    batches: list[Batch]
    sums: Mapping[str, Tensor]


class Task(Protocol):
    """What is trained, how it is judged, and how it is kept."""

    module: nn.Module

    def prepare(self, module: nn.Module, window: list[Batch], place: StepPlace) -> Prepared:
        """Return the micro-batches to train on in place of those in the data; leaves the module and all randomness alone."""

    def loss(self, module: nn.Module, batch: Batch, num_labels: Tensor, world_size: int) -> BatchLoss:
        """Return the loss of a micro-batch under the (wrapped) module."""

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Return metrics on held-out prompts; `tokens_per_target_step` among them chooses what is kept."""

    def save(self, module: nn.Module, progress: Progress, metrics: dict[str, float]) -> None:
        """Keep the module as the best so far."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    steps: int
    best_score: float
    best_step: int
    seconds: float
    training_seconds: float  # of them, those of training steps: held-out decoding and checkpoints left out
    labels: int  # trained on in this process since it started
    trained_parameters: int


def train(
    task: Task,
    loader: DataLoader[Batch],
    optimizer_config: OptimizerConfig,
    schedule: ScheduleConfig,
    accelerator: Accelerator,
    output: Path,
    config: dict[str, Any],
) -> Outcome:
    """Train until the schedule ends, going on from the newest checkpoint in `output` where asked to.

    Raises:
        InputError: the checkpoint belongs to another config.
        RuntimeError: a loss is not finite; the step it would have spoilt is not taken.
    """
    return _Training(task, loader, optimizer_config, schedule, accelerator, output, config).run()


class _Training:
    """A run under way."""

    def __init__(
        self,
        task: Task,
        loader: DataLoader[Batch],
        optimizer_config: OptimizerConfig,
        schedule: ScheduleConfig,
        accelerator: Accelerator,
        output: Path,
        config: dict[str, Any],
    ) -> None:
        self.task, self.schedule, self.accelerator, self.output = task, schedule, accelerator, output
        self.max_grad_norm = optimizer_config.max_grad_norm
        self.checkpoints = output / "checkpoints"
        self.loader = accelerator.prepare(loader)
        steps_per_epoch = math.ceil(len(self.loader) / schedule.gradient_accumulation_steps)
        self.num_steps = schedule.max_steps or schedule.epochs * steps_per_epoch
        optimizer, scheduler = make_optimizer(task.module, optimizer_config, self.num_steps)
        # Before the module is wrapped: a wrapper may shard it over the processes.
        self.trained_parameters = sum(each.numel() for each in task.module.parameters() if each.requires_grad)
        self.module, self.optimizer = accelerator.prepare(task.module, optimizer)
        # Not prepared: accelerate would step it once a process, and this loop counts optimiser steps.
        self.scheduler = scheduler
        self.progress, self.config_sha256 = Progress(), _fingerprint(config)
        accelerator.register_for_checkpointing(self.scheduler, self.progress)
        accelerator.init_trackers("draftsmith", config={"config": json.dumps(config)})
        self.books = Books(accelerator)
        self.seconds_aside = 0.0  # not spent on training steps

    def run(self) -> Outcome:
        self.started = time.perf_counter()
        self._resume()
        self.history = History(self.output, done_steps=self.progress.step)
        labels = 0
        while self.progress.step < self.num_steps:
            for window in self._windows():
                labels += self._step(window)
                self._after_step()
                if self.progress.step >= self.num_steps:
                    break
            else:
                self.progress.epoch += 1
                self.progress.steps_in_epoch = 0
        self.accelerator.end_training()
        if self.progress.best_score is None or self.progress.best_step is None:
            raise RuntimeError("the run ended without an evaluation")
        seconds = time.perf_counter() - self.started
        return Outcome(
            steps=self.progress.step,
            best_score=self.progress.best_score,
            best_step=self.progress.best_step,
            seconds=seconds,
            training_seconds=seconds - self.seconds_aside,
            labels=labels,
            trained_parameters=self.trained_parameters,
        )

    def _resume(self) -> None:
        found = list_checkpoints(self.checkpoints)
        if self.schedule.resume and found:
            load_checkpoint(self.accelerator, found[-1], self.config_sha256)
            log.info("resumed from %s", found[-1])

    def _windows(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each remaining optimiser step of this epoch."""
        accumulate = self.schedule.gradient_accumulation_steps
        self.loader.set_epoch(self.progress.epoch)
        done = self.progress.steps_in_epoch * accumulate
        batches = iter(self.accelerator.skip_first_batches(self.loader, done) if done else self.loader)
        while window := list(islice(batches, accumulate)):
            yield window

    def _step(self, window: list[Batch]) -> int:
        """Take one optimiser step over the micro-batches in `window`; return how many labels this process gave."""
        place = StepPlace(step=self.progress.step, num_steps=self.num_steps)
        prepared = self.task.prepare(self.accelerator.unwrap_model(self.module), window, place)
        window = prepared.batches
        self.books.add(prepared.sums)
        own_labels = torch.stack([batch.loss_mask_BT[:, 1:].sum() for batch in window]).sum()
        num_labels = self.accelerator.reduce(own_labels.clone(), "sum").clamp(min=1)
        for number, batch in enumerate(window):
            last = number == len(window) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.module):
                with self.accelerator.autocast():
                    outcome = self.task.loss(self.module, batch, num_labels, self.accelerator.num_processes)
                self._refuse_non_finite(outcome.loss, number, batch)
                self.accelerator.backward(outcome.loss)
            self.books.add(outcome.sums, outcome.counts)
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.books.close_step(own_labels, norm)
        self.progress.step += 1
        self.progress.steps_in_epoch += 1
        return int(own_labels)

    def _refuse_non_finite(self, loss: Tensor, number: int, batch: Batch) -> None:
        if not torch.isfinite(loss):
            progress = self.progress
            where = f"step {progress.step + 1} (epoch {progress.epoch}, step {progress.steps_in_epoch + 1} of it)"
            rows = ", ".join(map(str, batch.conversation_B.tolist()))
            raise RuntimeError(
                f"the loss is {loss.item()} in {where}, micro-batch {number + 1}, conversations {rows} of data.train, counted "
                "from 0; the step was not taken, the last checkpoint stands"
            )

    def _after_step(self) -> None:
        """Log, decode held-out prompts and write a checkpoint, each where it is due."""
        step, last = self.progress.step, self.progress.step == self.num_steps
        if last or step % self.schedule.log_every_steps == 0:
            metrics = self.books.report() | {"learning_rate": float(self.scheduler.get_last_lr()[0])}
            self.accelerator.log({f"train/{name}": value for name, value in metrics.items()}, step=step)
            log.info("step %d/%d: %s", step, self.num_steps, _in_words(metrics))
        started = time.perf_counter()
        if last or _due(step, self.schedule.eval_every_steps):
            metrics = self._evaluate()
            if last and (gap := explain_gap(metrics)) is not None:
                log.warning(gap)
        if last or _due(step, self.schedule.checkpoint_every_steps):
            keep = self.schedule.keep_checkpoints
            save_checkpoint(self.accelerator, self.checkpoints, step, keep=keep, config_sha256=self.config_sha256)
        aside = time.perf_counter() - started
        self.seconds_aside += aside
        self.books.leave_out(aside)

    def _evaluate(self) -> dict[str, float]:
        """Decode held-out prompts, write down how that went, and keep the draft if it beats all before; return the metrics."""
        unwrapped = self.accelerator.unwrap_model(self.module)
        metrics = self.task.evaluate(unwrapped)
        self.accelerator.log({f"held_out/{name}": value for name, value in metrics.items()}, step=self.progress.step)
        log.info("step %d/%d, held out: %s", self.progress.step, self.num_steps, _in_words(metrics))
        if self.accelerator.is_main_process:
            self.history.add(self.progress.step, time.perf_counter() - self.started, metrics)
        score = metrics["tokens_per_target_step"]
        if self.progress.best_score is None or score > self.progress.best_score:
            self.progress.best_score, self.progress.best_step = score, self.progress.step
            if self.accelerator.is_main_process:
                self.task.save(unwrapped, self.progress, metrics)
        self.accelerator.wait_for_everyone()
        return metrics


def make_optimizer(module: nn.Module, config: OptimizerConfig, num_steps: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Return AdamW over the trainable parameters, no decay on vectors, and linear warm-up with a cosine to `final_share`."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))
    warmup = max(1, round(config.warmup_share * num_steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * done))

    return optimizer, LambdaLR(optimizer, factor)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _fingerprint(config: dict[str, Any]) -> str:
    """Return a hash of what decides the weights and which are kept: not where and how often things are written, nor the gates.

    The decoding of held-out prompts belongs to it: scores got in another way cannot be compared with the best so far.
    """
    relevant = {name: value for name, value in config.items() if name not in ("output", "sanity", "schedule")}
    quiet = {"log_every_steps", "eval_every_steps", "checkpoint_every_steps", "keep_checkpoints", "resume", "trackers"}
    relevant["schedule"] = {name: value for name, value in config["schedule"].items() if name not in quiet}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def _in_words(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())

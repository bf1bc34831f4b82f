"""The one training loop: batch, loss, backward, clip, step; then log?, evaluate?, checkpoint?

It knows neither drafts nor targets. A `Task` brings the module, the loss of a batch, the score on held-out prompts and the
way to save what was trained; the loop brings accelerate, the schedule, the books and the checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
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
from train.checkpoints import Progress, list_checkpoints, load_checkpoint, save_checkpoint

log = logging.getLogger("draftsmith")


@dataclass(frozen=True, kw_only=True)
class BatchLoss:
    """The loss of one micro-batch, already divided by the labels of the whole step, and sums for the books.

    Args:
        loss: scalar to go backward from.
        sums: metric name -> sum over this batch's labels; the loop adds them up and divides once by all labels.
    """

    loss: Tensor
    sums: Mapping[str, Tensor]


class Task(Protocol):
    """What is trained, how it is judged, and how it is kept."""

    module: nn.Module

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
    labels: int  # trained on in this process since it started


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
        self.task, self.schedule, self.accelerator = task, schedule, accelerator
        self.max_grad_norm = optimizer_config.max_grad_norm
        self.checkpoints = output / "checkpoints"
        self.loader = accelerator.prepare(loader)
        steps_per_epoch = math.ceil(len(self.loader) / schedule.gradient_accumulation_steps)
        self.num_steps = schedule.max_steps or schedule.epochs * steps_per_epoch
        optimizer, scheduler = make_optimizer(task.module, optimizer_config, self.num_steps)
        self.module, self.optimizer = accelerator.prepare(task.module, optimizer)
        # Not prepared: accelerate would step it once a process, and this loop counts optimiser steps.
        self.scheduler = scheduler
        self.progress, self.config_sha256 = Progress(), _fingerprint(config)
        accelerator.register_for_checkpointing(self.scheduler, self.progress)
        accelerator.init_trackers("draftsmith", config={"config": json.dumps(config)})
        self.books = _Books(accelerator)

    def run(self) -> Outcome:
        started = time.perf_counter()
        self._resume()
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
        return Outcome(
            steps=self.progress.step,
            best_score=self.progress.best_score,
            best_step=self.progress.best_step,
            seconds=time.perf_counter() - started,
            labels=labels,
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
        own_labels = torch.stack([batch.loss_mask_BT[:, 1:].sum() for batch in window]).sum()
        num_labels = self.accelerator.reduce(own_labels.clone(), "sum").clamp(min=1)
        for number, batch in enumerate(window):
            last = number == len(window) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.module):
                with self.accelerator.autocast():
                    outcome = self.task.loss(self.module, batch, num_labels, self.accelerator.num_processes)
                self._refuse_non_finite(outcome.loss, number, batch)
                self.accelerator.backward(outcome.loss)
            self.books.add(outcome.sums)
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
            self._evaluate()
        if last or _due(step, self.schedule.checkpoint_every_steps):
            keep = self.schedule.keep_checkpoints
            save_checkpoint(self.accelerator, self.checkpoints, step, keep=keep, config_sha256=self.config_sha256)
        self.books.leave_out(time.perf_counter() - started)

    def _evaluate(self) -> None:
        """Decode held-out prompts, and keep the draft if it yields more tokens a target step than any before."""
        unwrapped = self.accelerator.unwrap_model(self.module)
        metrics = self.task.evaluate(unwrapped)
        self.accelerator.log({f"held_out/{name}": value for name, value in metrics.items()}, step=self.progress.step)
        log.info("step %d/%d, held out: %s", self.progress.step, self.num_steps, _in_words(metrics))
        score = metrics["tokens_per_target_step"]
        if self.progress.best_score is None or score > self.progress.best_score:
            self.progress.best_score, self.progress.best_step = score, self.progress.step
            if self.accelerator.is_main_process:
                self.task.save(unwrapped, self.progress, metrics)
        self.accelerator.wait_for_everyone()


class _Books:
    """Sums and counts between two log lines, added over processes before any division."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._clear()

    def _clear(self) -> None:
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.accelerator.device))
        self.labels = torch.zeros((), device=self.accelerator.device)
        self.norms: list[Tensor] = []
        self.started = time.perf_counter()

    def add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] += value.detach()

    def close_step(self, labels: Tensor, norm: Tensor | None) -> None:
        self.labels += labels
        if norm is not None:
            self.norms.append(norm)

    def leave_out(self, seconds: float) -> None:
        """Count seconds that were not spent on training steps out of the rate."""
        self.started += seconds

    def report(self) -> dict[str, float]:
        """Return averages over labels since the last report, and start anew."""
        names = sorted(self.sums)
        totals = self.accelerator.reduce(torch.stack([self.labels, *(self.sums[name] for name in names)]), "sum").tolist()
        labels, *sums = totals
        seconds = time.perf_counter() - self.started
        report = {name: value / max(labels, 1) for name, value in zip(names, sums, strict=True)}
        report["gradient_norm"] = float(sum(map(float, self.norms)) / max(len(self.norms), 1))
        report["labels_per_second"] = labels / seconds
        self._clear()
        return report


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
    """Return a hash of what decides the weights and which are kept: the config but for where and how often things are written.

    The decoding of held-out prompts belongs to it: scores got in another way cannot be compared with the best so far.
    """
    relevant = {name: value for name, value in config.items() if name not in ("output", "schedule")}
    quiet = {"log_every_steps", "eval_every_steps", "checkpoint_every_steps", "keep_checkpoints", "resume", "trackers"}
    relevant["schedule"] = {name: value for name, value in config["schedule"].items() if name not in quiet}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def _in_words(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())

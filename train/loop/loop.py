"""The training loop: batches, loss, backward, clip, step; then log?, evaluate?, checkpoint? (`train.loop.milestones`).

It knows neither drafts nor targets. A `Task` brings the module, the loss of a batch, the score on held-out prompts and the
artifact; the loop brings accelerate, the schedule, the metrics and the checkpoints.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from configs.runtime.terminal import progress
from configs.schema.training import DistillConfig, HeadsConfig
from distill.signals import SignalSource, TargetSignals
from heads.device import to_device
from heads.modules.interface import Batch
from train.loop.checkpoints import Checkpoints, Progress
from train.loop.engines import choose_engine, make_optimizer
from train.loop.lineage import Lineage
from train.loop.milestones import Milestones, check_finite
from train.loop.telemetry import StepClock, StepMetrics, start_trackers

log = logging.getLogger("draftsmith")


@dataclass(frozen=True, kw_only=True)
class BatchLoss:
    """The loss of one micro-batch, summed over its labels, and sums for the metrics."""

    loss: Tensor  # scalar
    sums: Mapping[str, Tensor]  # by metric, over this batch's labels; the loop adds them up and divides once by all labels
    counts: Mapping[str, Tensor] = field(default_factory=dict)  # to divide by in place of the labels


class Task(Protocol):
    """What is trained: the module, its loss, its evaluation and its artifact; and how its weights may be sharded."""

    module: nn.Module
    clock: StepClock  # started by the loop
    source: SignalSource  # of the target's side of the loss
    drafts_while_training: bool  # whether `prepare` reads the module's weights

    def prepare(self, module: nn.Module, batches: list[Batch], step: int) -> tuple[list[Batch], Mapping[str, Tensor]]:
        """Return a step's micro-batches to train on in place of those of the data, and sums over their labels for the metrics.

        Args:
            module: with full weights where the task drafts with it (`drafts_while_training`); neither it nor the random state
                is changed.
            step: optimiser steps done before.
        """

    def loss(self, module: nn.Module, batch: Batch, signals: TargetSignals) -> BatchLoss:
        """Return the loss of a micro-batch under the (wrapped) module, against the target's signals over it."""

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Return metrics on held-out prompts; `tokens_per_target_step` among them chooses what is kept."""

    def save(self, module: nn.Module, progress: Progress, metrics: dict[str, float]) -> None:
        """Write the artifact of the module, which is the best so far."""

    def copy_of_module(self) -> nn.Module:
        """Return a copy of the module around the same target."""

    def units(self) -> Sequence[nn.Module]:
        """Return the module's layers that run exactly once a forward: FSDP2 units. The rest is sharded with the root."""

    def read_from_outside(self) -> Sequence[nn.Parameter]:
        """Return the weights that the module reads without running the modules that own them, for ZeRO-3."""


def train(
    task: Task,
    loader: DataLoader[Batch],
    config: DistillConfig | HeadsConfig,
    accelerator: Accelerator,
    contents: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Train until the schedule ends, from the newest usable checkpoint in the output where `schedule.resume` is set.

    Return how the run ended (`Milestones.result`). A checkpoint of another config, or of files of other `contents` (their
    hashes), is not resumed from. Ends by an InputError (checkpoints), RunFailed (a loss or gradient is not finite) or Stopped
    (SIGTERM came).
    """
    with _noted_sigterm() as stops:
        training = Training(task, loader, config, accelerator, contents or {}, stops)
        start_trackers(accelerator, Path(config.output), config.model_dump(mode="json"))
        try:
            return training.run()
        finally:
            training.checkpoints.finish()


class Training:
    """A run; see `train`."""

    def __init__(
        self,
        task: Task,
        loader: DataLoader[Batch],
        config: DistillConfig | HeadsConfig,
        accelerator: Accelerator,
        contents: Mapping[str, str],
        stops: list[int],
    ) -> None:
        schedule = config.schedule
        self.task, self.schedule, self.accelerator, self.stops = task, schedule, accelerator, stops
        self.max_grad_norm = config.optimizer.max_grad_norm
        self.engine = choose_engine(accelerator, schedule, config.optimizer)
        self.loader = accelerator.prepare(loader)
        steps_per_epoch = math.ceil(len(self.loader) / schedule.gradient_accumulation_steps)
        self.num_steps = schedule.max_steps or schedule.epochs * steps_per_epoch
        # Before the module is wrapped: a wrapper may shard it over the processes.
        self.trained_parameters = sum(each.numel() for each in task.module.parameters() if each.requires_grad)
        make = partial(make_optimizer, config=config.optimizer, num_steps=self.num_steps)
        # The scheduler is not prepared: accelerate would step it once a process, and this loop counts optimiser steps.
        self.module, self.optimizer, self.scheduler = self.engine.prepare(task, make)
        self.progress, self.clock = Progress(), task.clock
        self.checkpoints = Checkpoints(
            folder=Path(config.output) / "checkpoints",
            accelerator=accelerator,
            module=self.module,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            lineage=Lineage.of(accelerator, schedule, config.model_dump(mode="json"), contents),
            keep=schedule.keep_checkpoints,
            progress=self.progress,
        )
        # As peers count a model's FLOPs (PaLM, 2204.02311, appendix B, without attention): padding, recomputation, masked
        # pairs, and the depths and blocks that a head adds to a position do not count.
        flops = 6.0 * self.trained_parameters + 2.0 * task.source.num_parameters
        self.metrics = StepMetrics(accelerator, self.clock, flops)
        self.milestones = Milestones(self, Path(config.output))

    def run(self) -> dict[str, Any]:
        self.clock.start()
        if self.schedule.resume:
            self._resume()
        self.milestones.begin()
        with progress("training", self.num_steps, "steps", done=self.progress.step) as advance:
            labels = self._take_steps(advance)
        self.accelerator.end_training()
        return self.milestones.result(labels)

    def _resume(self) -> None:
        with self.clock("checkpoint"):
            path = self.checkpoints.resume()
        if path is not None:
            log.info("resumed from %s", path)

    def _take_steps(self, advance: Callable[[int], None]) -> int:
        """Take the steps that are left; return the number of this process's labels."""
        labels = 0
        while self.progress.step < self.num_steps:
            for batches in self._steps_of_epoch():
                labels += self.step(batches)
                self.milestones.after_step(stopping=self.stopping)
                advance(1)
                if self.progress.step >= self.num_steps:
                    break
            else:
                self.progress.epoch += 1
                self.progress.steps_in_epoch = 0
        return labels

    def _steps_of_epoch(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each remaining optimiser step of this epoch; the last step may have fewer."""
        accumulate, done = self.schedule.gradient_accumulation_steps, self.progress.steps_in_epoch
        self.loader.set_epoch(self.progress.epoch)
        loader = self.accelerator.skip_first_batches(self.loader, done * accumulate) if done else self.loader
        batches = self.task.source.ahead(iter(loader))
        while True:
            with self.clock("data"):
                step = list(islice(batches, accumulate))
            if not step:
                return
            yield step

    def step(self, batches: list[Batch]) -> int:
        """Take one optimiser step over some micro-batches; return the number of this process's labels.

        The host waits for the device once, in `check_finite`. DeepSpeed takes the step in the last backward, unless the norm is
        not finite.
        """
        with self.clock("data"), self._drafting() as drafting:
            batches, sums = self.task.prepare(drafting, batches, self.progress.step)
        self.metrics.add(sums)
        own_labels = sum(batch.num_labels for batch in batches)
        num_labels, stops = (self._sum(each) for each in (own_labels, bool(self.stops)))
        # Gradients are averaged over the processes; each label of the step weighs the same.
        scale, losses = self.accelerator.num_processes / num_labels.clamp(min=1), []
        for number, batch in enumerate(batches):
            with self.clock("target"):
                signals = self.task.source.read(batch)
            with self.engine.micro_batch(self.module, last=number == len(batches) - 1):
                with self.clock("loss"), self.accelerator.autocast():
                    outcome = self.task.loss(self.module, batch, signals)
                    loss = outcome.loss * scale
                with self.clock("backward"):
                    self.engine.backward(loss)
            losses.append(loss.detach())
            self.metrics.add(outcome.sums, outcome.counts)
        with self.clock("optimizer"):
            norm = self.engine.clip(self.module, self.max_grad_norm)
            check_finite(self, losses, norm, batches)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.metrics.close_step(batches, own_labels, norm)
        self.stopping = bool(stops)  # a request to one process stops all after this step
        self.progress.step += 1
        self.progress.steps_in_epoch += 1
        return own_labels

    def _drafting(self) -> AbstractContextManager[nn.Module]:
        """Return the context of the module that writes on-policy rows."""
        return self.engine.full_weights(self.module) if self.task.drafts_while_training else nullcontext(self.module)

    def _sum(self, number: int) -> Tensor:
        """Return the sum of a number over all processes, on the device."""
        return self.accelerator.reduce(to_device([number], self.accelerator.device), "sum")[0]


@contextmanager
def _noted_sigterm() -> Iterator[list[int]]:
    """Yield the SIGTERMs that came, which then do not end the process; outside the main thread, where they do, none."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, before)

"""The training loop: batch, loss, backward, clip, step; then log?, evaluate?, checkpoint?

It knows neither drafts nor targets. A `Task` brings the module, the loss of a batch, the score on held-out prompts and the
artifact; the loop brings accelerate, the schedule, the metrics and the checkpoints.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from configs.runtime.errors import InputError, RunFailed, Stopped
from configs.runtime.files import write_json
from configs.runtime.run_record import HELD_OUT, SAMPLES_FILE
from configs.runtime.terminal import progress
from configs.schema.training import OptimizerConfig, ScheduleConfig
from heads.device import to_device
from heads.modules.interface import Batch
from train.loop.checkpoints import START_AGAIN, Checkpoints, Progress, writing
from train.loop.engines import choose_engine, make_optimizer
from train.loop.lineage import Lineage
from train.loop.read_ahead import Signals, Window, windows
from train.loop.task import Task
from train.telemetry.records import MetricsFile, explain_gap, start_trackers
from train.telemetry.step_clock import STEP_PARTS
from train.telemetry.step_metrics import SHARE, StepMetrics, find_peak

log = logging.getLogger("draftsmith")


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """How a run ended; seconds and labels are those of this process since it started."""

    steps: int
    best_score: float
    best_step: int
    seconds: float  # training_seconds + evaluation_seconds + checkpoint_seconds
    training_seconds: float  # training steps, logging included
    evaluation_seconds: float  # decoding held-out prompts
    checkpoint_seconds: float  # writing checkpoints and the best draft, and reading the checkpoint resumed from
    input_seconds: float  # part of training_seconds: waiting for batches, and reading a cache of the target
    labels: int
    trained_parameters: int


def train(
    task: Task,
    loader: DataLoader[Batch],
    optimizer_config: OptimizerConfig,
    schedule: ScheduleConfig,
    accelerator: Accelerator,
    output: Path,
    config: dict[str, Any],
    contents: Mapping[str, str] | None = None,
) -> TrainingResult:
    """Train until the schedule ends, from the newest usable checkpoint in `output` where `schedule.resume` is set.

    A checkpoint of another `config` (as JSON values), or of files of other `contents` (their hashes), is not resumed from.
    Ends by an InputError (checkpoints), RunFailed (a loss or gradient is not finite) or Stopped (SIGTERM came).
    """
    with _noted_sigterm() as stops:
        lineage = Lineage.of(accelerator, schedule, config, contents or {})
        training = _Training(task, loader, optimizer_config, schedule, accelerator, output, lineage, stops)
        start_trackers(accelerator, output, config)
        try:
            return training.run()
        finally:
            training.checkpoints.finish()


class _Training:
    def __init__(
        self,
        task: Task,
        loader: DataLoader[Batch],
        optimizer_config: OptimizerConfig,
        schedule: ScheduleConfig,
        accelerator: Accelerator,
        output: Path,
        lineage: Lineage,
        stops: list[int],
    ) -> None:
        self.task, self.schedule, self.accelerator, self.output, self.stops = task, schedule, accelerator, output, stops
        self.stopping = False
        self.max_grad_norm = optimizer_config.max_grad_norm
        self.engine = choose_engine(accelerator, schedule, optimizer_config)
        self.loader = accelerator.prepare(loader)
        steps_per_epoch = math.ceil(len(self.loader) / schedule.gradient_accumulation_steps)
        self.num_steps = schedule.max_steps or schedule.epochs * steps_per_epoch
        # Before the module is wrapped: a wrapper may shard it over the processes.
        self.trained_parameters = sum(each.numel() for each in task.module.parameters() if each.requires_grad)
        make = partial(make_optimizer, config=optimizer_config, num_steps=self.num_steps)
        # The scheduler is not prepared: accelerate would step it once a process, and this loop counts optimiser steps.
        self.module, self.optimizer, self.scheduler = self.engine.prepare(task, make)
        self.progress = Progress()
        self.checkpoints = Checkpoints(
            folder=output / "checkpoints",
            accelerator=accelerator,
            module=self.module,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            lineage=lineage,
            keep=schedule.keep_checkpoints,
            progress=self.progress,
            resume_anyway=schedule.resume_anyway,
        )
        self.clock = task.clock
        # As peers count model FLOP utilisation (PaLM, 2204.02311, appendix B, without attention): padding, recomputation,
        # masked pairs, and the depths and blocks that a head adds to a position do not count.
        flops = 6.0 * self.trained_parameters + 2.0 * task.source.num_parameters
        self.metrics = StepMetrics(accelerator, self.clock, flops, find_peak(accelerator.device, schedule))
        if isinstance(self.module, DistributedDataParallel):
            self.clock.follow_gradients(task.module)

    def run(self) -> TrainingResult:
        self.started = time.perf_counter()
        self.clock.start()
        if self.schedule.resume:
            self._resume()
        self.metrics_file = None
        if self.accelerator.is_main_process:
            # The evaluation of the last step has no line yet where it is still to be made.
            evaluated = self.progress.step - (not self.progress.evaluated)
            self.metrics_file = MetricsFile(self.output, done_steps=self.progress.step, evaluated_steps=evaluated)
        if not self.progress.evaluated:
            self._evaluate_and_save()
        with progress("training", self.num_steps, "steps", done=self.progress.step) as advance:
            labels = self._take_steps(advance)
        self.accelerator.end_training()
        if self.progress.best_score is None or self.progress.best_step is None:
            raise RuntimeError("the run ended without an evaluation")
        seconds = self.clock.seconds()
        return TrainingResult(
            steps=self.progress.step,
            best_score=self.progress.best_score,
            best_step=self.progress.best_step,
            seconds=sum(seconds.values()),
            training_seconds=sum(seconds[part] for part in STEP_PARTS),
            evaluation_seconds=seconds["evaluation"],
            checkpoint_seconds=seconds["checkpoint"],
            input_seconds=seconds["data"],
            labels=labels,
            trained_parameters=self.trained_parameters,
        )

    def _take_steps(self, advance: Callable[[int], None]) -> int:
        """Take the steps that are left; return the number of this process's labels."""
        labels = 0
        while self.progress.step < self.num_steps:
            for window, ahead in self._windows():
                labels += self._step(window, ahead)
                self._after_step()
                advance(1)
                if self.progress.step >= self.num_steps:
                    break
            else:
                self.progress.epoch += 1
                self.progress.steps_in_epoch = 0
        return labels

    def _resume(self) -> None:
        with self.clock("checkpoint"):
            path = self.checkpoints.resume()
        if path is None:
            return
        unscored = self.progress.evaluated and self.progress.best_score is None
        if self.progress.step + unscored > self.num_steps:  # the last step of a run has a score
            raise InputError(
                f"checkpoint {path} has {self.progress.step} steps of a longer run, and this one ends after {self.num_steps}; "
                f"{START_AGAIN}"
            )
        log.info("resumed from %s", path)

    def _windows(self) -> Iterator[tuple[Window, Iterator[Signals]]]:
        """Yield the micro-batches of each remaining optimiser step of this epoch, and the signals that were read ahead."""
        accumulate = self.schedule.gradient_accumulation_steps
        self.loader.set_epoch(self.progress.epoch)
        done = self.progress.steps_in_epoch * accumulate
        batches = iter(self.accelerator.skip_first_batches(self.loader, done) if done else self.loader)
        source = self.task.source
        read = source.read if source.reads_ahead else lambda batch: None
        remaining = windows(source.ahead(batches), accumulate, read, self.accelerator.device)
        while True:
            with self.clock("data"):
                found = next(remaining, None)
            if found is None:
                return
            yield found

    def _step(self, window: Window, ahead: Iterator[Signals]) -> int:
        """Take one optimiser step over the micro-batches in `window`; return the number of this process's labels.

        The host waits for the device once, in `_check_finite`; under fp16 once more, for the loss scaler. DeepSpeed takes the
        step in the last backward, unless the norm is not finite.
        """
        drafts = self.task.drafts_while_training
        with self.clock("rewriting"), self.engine.unsharded(self.module) if drafts else nullcontext(self.module) as drafting:
            window, sums = self.task.prepare(drafting, window, self.progress.step)
        self.metrics.add(sums)
        own_labels = sum(batch.num_labels for batch in window)
        # A stop request to one process stops all: they learn of it with the labels, at no cost, and end after this step.
        table = to_device([own_labels, bool(self.stops)], self.accelerator.device)
        with self.clock("communication"):
            all_labels, stops = self.accelerator.reduce(table, "sum")
        # Gradients are averaged over the processes: so every label of the step weighs the same.
        factor, losses = self.accelerator.num_processes / all_labels.clamp(min=1), []
        for number, batch in enumerate(window):
            last = number == len(window) - 1
            with self.clock("data" if self.task.source.reads_ahead else "target"):
                signals = next(ahead) or self.task.source.read(batch)
            with self.engine.micro_batch(self.module, last=last):
                with self.accelerator.autocast(), self.clock("loss"):
                    outcome = self.task.loss(self.module, batch, signals)
                    loss = outcome.loss * factor
                losses.append(loss.detach())
                with self.clock("backward"):
                    self.engine.backward(loss)
            self.metrics.add(outcome.sums, outcome.counts)
        with self.clock("optimizer"):
            norm = self.engine.clip(self.module, self.max_grad_norm)
            self._check_finite(losses, norm, stops, window)
            self.optimizer.step()
            skipped = self.accelerator.optimizer_step_was_skipped  # under fp16, where a gradient was not finite
            if not skipped:
                self.scheduler.step()
            self.optimizer.zero_grad()
        self.metrics.close_step(window, own_labels, None if skipped else norm)
        self.progress.step += 1
        self.progress.steps_in_epoch += 1
        return own_labels

    def _check_finite(self, losses: list[Tensor], norm: Tensor | float | None, stops: Tensor, window: Window) -> None:
        """Refuse losses and gradients that are not finite (fp16's scaler skips these), and note a stop, in one transfer."""
        norms = [] if norm is None or self.accelerator.scaler is not None else [torch.as_tensor(norm, device=stops.device)]
        num_stops, *values = torch.stack([each.to(losses[0].dtype) for each in (stops, *losses, *norms)]).tolist()
        self.stopping = num_stops > 0
        bad = next((number for number, value in enumerate(values) if not math.isfinite(value)), None)
        if bad is None:
            return
        progress, is_loss = self.progress, bad < len(losses)
        where = f"step {progress.step + 1} (epoch {progress.epoch}, step {progress.steps_in_epoch + 1} of it)"
        read = window[bad : bad + 1] if is_loss else window
        rows = [row for batch in read for row in batch.on_host.conversations_BC.flatten().tolist() if row >= 0]
        raise RunFailed(
            f"the {'loss' if is_loss else 'norm of the gradient'} is {values[bad]} in {where}, "
            f"{f'micro-batch {bad + 1}, ' if is_loss else ''}conversations {', '.join(map(str, rows))} of data.train, counted "
            "from 0; the step was not taken, the last checkpoint stands"
        )

    def _after_step(self) -> None:
        """Log, evaluate and write a checkpoint, each where it is due; or stop where that was requested."""
        step, last = self.progress.step, self.progress.step == self.num_steps
        self.checkpoints.check()
        logged = last or step % self.schedule.log_every_steps == 0
        if logged:
            self._log()
        self.progress.evaluated = False
        if self.stopping:
            self._stop(logged=logged)
        self._evaluate_and_save()

    def _log(self) -> None:
        """Report the steps since the last report to the trackers, the metrics file and, in short, the log."""
        step = self.progress.step
        metrics = self.metrics.report() | {"learning_rate": float(self.scheduler.get_last_lr()[0])}
        self.accelerator.log({f"train/{name}": value for name, value in metrics.items()}, step=step)
        if self.metrics_file is not None:
            self.metrics_file.add(step, time.perf_counter() - self.started, metrics)
        shown = {name: value for name, value in metrics.items() if not name.startswith(SHARE)}
        log.info("step %d/%d: %s", step, self.num_steps, _format(shown))

    def _stop(self, *, logged: bool) -> None:
        """Write a checkpoint and end the run; what else is due may take longer than the time that is left."""
        with self.clock("checkpoint"):
            self.checkpoints.save()
        if not logged:  # steps since the last report will not be taken again
            self._log()
        self.accelerator.end_training()
        raise Stopped(
            f"stopped by SIGTERM after step {self.progress.step} of {self.num_steps}; a checkpoint is in "
            f"{self.checkpoints.folder}. Rerun the same command to resume."
        )

    def _evaluate_and_save(self) -> None:
        """Evaluate and write a checkpoint, each where it is due after this step."""
        step, last = self.progress.step, self.progress.step == self.num_steps
        if last or _due(step, self.schedule.eval_every_steps):
            with self.clock("evaluation"), self.engine.unsharded(self.module) as unwrapped:
                metrics = self._evaluate(unwrapped)
            if last and (gap := explain_gap(metrics)) is not None:
                log.warning(gap)
        self.progress.evaluated = True
        if last or _due(step, self.schedule.checkpoint_every_steps):
            with self.clock("checkpoint"):
                self.checkpoints.save(wait=last)

    def _evaluate(self, unwrapped: nn.Module) -> dict[str, float]:
        """Evaluate the unsharded module, and keep it if it is the best so far; return the metrics."""
        metrics = self.task.evaluate(unwrapped)
        named = {HELD_OUT + name: value for name, value in metrics.items()}
        self.accelerator.log(named, step=self.progress.step)
        log.info("step %d/%d, held out: %s", self.progress.step, self.num_steps, _format(metrics))
        if self.metrics_file is not None:
            self.metrics_file.add(self.progress.step, time.perf_counter() - self.started, named)
            write_json(self.output / SAMPLES_FILE, {"step": self.progress.step, "samples": list(self.task.samples)})
        score = metrics["tokens_per_target_step"]
        if self.progress.best_score is None or score > self.progress.best_score:
            self.progress.best_score, self.progress.best_step = score, self.progress.step
            if self.accelerator.is_main_process:
                with self.clock("checkpoint"), writing(self.output / "artifact"):
                    self.task.save(unwrapped, self.progress, metrics)
        self.accelerator.wait_for_everyone()
        return metrics


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


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _format(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())

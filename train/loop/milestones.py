"""What a training does beside its steps: report, evaluate, keep the best draft, write checkpoints, stop; and how it ends."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from configs.runtime.errors import RunFailed, Stopped
from configs.runtime.run_record import HELD_OUT
from heads.modules.interface import Batch
from train.loop.checkpoints import writing
from train.loop.telemetry import SHARE, STEP_PARTS, MetricsFile, explain_gap

if TYPE_CHECKING:
    from train.loop.loop import Training

log = logging.getLogger("draftsmith")


class Milestones:
    """What is done after steps of a training, each where the schedule has it due, and all of it after the last step."""

    def __init__(self, training: Training, output: Path) -> None:
        self.training, self.output = training, output
        self.task, self.clock, self.progress = training.task, training.clock, training.progress
        self.accelerator, self.schedule = training.accelerator, training.schedule
        self.metrics_file: MetricsFile | None = None  # of the main process
        self.started = time.perf_counter()

    def begin(self) -> None:
        """Open the metrics file; make the evaluation that a run which was stopped has left."""
        self.started = time.perf_counter()
        if self.accelerator.is_main_process:
            evaluated = self.progress.step - self.progress.evaluation_pending
            self.metrics_file = MetricsFile(self.output, done_steps=self.progress.step, evaluated_steps=evaluated)
        if self.progress.evaluation_pending:
            self._evaluate_and_save()

    def after_step(self, *, stopping: bool) -> None:
        """Log, evaluate and write a checkpoint, each where it is due; or stop where that was requested."""
        self.training.checkpoints.check()
        logged = self._is_due(self.schedule.log_every_steps)
        if logged:
            self._log()
        self.progress.evaluation_pending = True
        if stopping:
            self._stop(logged=logged)
        self._evaluate_and_save()

    def result(self, labels: int) -> dict[str, Any]:
        """Return how the run ended; seconds and labels are those of this process since it started."""
        assert self.progress.best_score is not None  # the last step was evaluated
        seconds = self.clock.seconds()
        return {
            "steps": self.progress.step,
            "best_score": self.progress.best_score,
            "best_step": self.progress.best_step,
            "seconds": sum(seconds.values()),
            "training_seconds": sum(seconds[part] for part in STEP_PARTS),  # logging included
            "evaluation_seconds": seconds["evaluation"],  # decoding held-out prompts
            "checkpoint_seconds": seconds["checkpoint"],  # the best draft and the checkpoint resumed from included
            "input_seconds": seconds["data"],  # part of training: waiting for batches, and reading a cache of the target
            "labels": labels,
            "trained_parameters": self.training.trained_parameters,
        }

    def _is_due(self, every: int | None) -> bool:
        return self.progress.step == self.training.num_steps or (every is not None and self.progress.step % every == 0)

    def _log(self) -> None:
        """Report the steps since the last report to the trackers, the metrics file and, in short, the log."""
        step = self.progress.step
        metrics = self.training.metrics.report() | {"learning_rate": float(self.training.scheduler.get_last_lr()[0])}
        self.accelerator.log({f"train/{name}": value for name, value in metrics.items()}, step=step)
        if self.metrics_file is not None:
            self.metrics_file.add(step, time.perf_counter() - self.started, metrics)
        shown = {name: value for name, value in metrics.items() if not name.startswith(SHARE)}
        log.info("step %d/%d: %s", step, self.training.num_steps, _format(shown))

    def _stop(self, *, logged: bool) -> None:
        """Write a checkpoint and end the run; what else is due may take longer than the time that is left."""
        with self.clock("checkpoint"):
            self.training.checkpoints.save()
        if not logged:  # steps since the last report will not be taken again
            self._log()
        self.accelerator.end_training()
        raise Stopped(
            f"stopped by SIGTERM after step {self.progress.step} of {self.training.num_steps}; a checkpoint is in "
            f"{self.training.checkpoints.folder}. Rerun the same command to resume."
        )

    def _evaluate_and_save(self) -> None:
        """Evaluate and write a checkpoint, each where it is due after this step."""
        last = self.progress.step == self.training.num_steps
        if self._is_due(self.schedule.eval_every_steps):
            with self.clock("evaluation"), self.training.engine.full_weights(self.training.module) as unwrapped:
                metrics = self._evaluate(unwrapped)
            if last and (gap := explain_gap(metrics)) is not None:
                log.warning(gap)
        self.progress.evaluation_pending = False
        if self._is_due(self.schedule.checkpoint_every_steps):
            with self.clock("checkpoint"):
                self.training.checkpoints.save(wait=last)

    def _evaluate(self, unwrapped: nn.Module) -> dict[str, float]:
        """Evaluate the module with full weights, and keep it if it is the best so far; return the metrics."""
        metrics, progress = self.task.evaluate(unwrapped), self.progress
        named = {HELD_OUT + name: value for name, value in metrics.items()}
        self.accelerator.log(named, step=progress.step)
        log.info("step %d/%d, held out: %s", progress.step, self.training.num_steps, _format(metrics))
        if self.metrics_file is not None:
            self.metrics_file.add(progress.step, time.perf_counter() - self.started, named)
        score = metrics["tokens_per_target_step"]
        if progress.best_score is None or score > progress.best_score:
            progress.best_score, progress.best_step = score, progress.step
            if self.accelerator.is_main_process:
                with self.clock("checkpoint"), writing(self.output / "artifact"):
                    self.task.save(unwrapped, progress, metrics)
        self.accelerator.wait_for_everyone()
        return metrics


def check_finite(training: Training, losses: list[Tensor], norm: Tensor | float | None, batches: list[Batch]) -> None:
    """Refuse losses and gradients that are not finite, in one transfer."""
    norms = [] if norm is None else [torch.as_tensor(norm, device=training.accelerator.device)]
    values = torch.stack([each.to(losses[0].dtype) for each in (*losses, *norms)]).tolist()
    bad = next((number for number, value in enumerate(values) if not math.isfinite(value)), None)
    if bad is None:
        return
    progress, is_loss = training.progress, bad < len(losses)
    where = f"step {progress.step + 1} (epoch {progress.epoch}, step {progress.steps_in_epoch + 1} of it)"
    read = batches[bad : bad + 1] if is_loss else batches
    rows = [row for batch in read for row in batch.on_host.conversations_BC.flatten().tolist() if row >= 0]
    raise RunFailed(
        f"the {'loss' if is_loss else 'norm of the gradient'} is {values[bad]} in {where}, "
        f"{f'micro-batch {bad + 1}, ' if is_loss else ''}conversations {', '.join(map(str, rows))} of data.train, counted "
        "from 0; the step was not taken, the last checkpoint stands"
    )


def _format(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())

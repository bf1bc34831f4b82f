"""Optimiser steps of a head's training as `train.loop.loop` takes them; data, steps and checkpoints are timed.

Data, cache, task, batches, optimiser, wrapping and checkpoints are the training's own; its metrics, log and held-out decoding
are left out. One process of `scripts/lab/bench/scale.py` runs this file as a script; by hand:

    python -m torch.distributed.run --nproc_per_node 2 scripts/lab/bench/scale_steps.py --config steps.yaml
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from configs.runtime.files import write_json
from configs.schema.training import HeadsConfig
from distill.loss.head_objective import HeadLoss
from heads.frozen.processes import join_processes
from heads.modules.interface import NO_DOCUMENT, Batch
from scripts.lab.bench.harness import read_kibibytes
from scripts.lab.settings import ScaleStepsConfig
from train.launch import load_materials, make_accelerator, make_training_loader, open_training_cache
from train.loop.checkpoints import Checkpoints, Progress
from train.loop.engines import choose_engine, make_optimizer
from train.loop.lineage import Lineage
from train.tasks.head import HeadTask

SAMPLING_SECONDS = 0.005


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What was measured over the timed steps.

    seconds: of all of them, the first process's clock, from and to a point where all processes meet.
    tokens: of all processes, padding left out.
    input_seconds: the first process's, waiting for batches and for what a cache holds of them.
    checkpoint_seconds: of one checkpoint, on average; 0 where none was written.
    baseline_bytes, peak_bytes: of memory that is the process's own, before target and data were loaded, and at most while the
        steps ran; 0 where it was not watched.
    """

    num_processes: int
    steps: int
    seconds: float
    tokens: int
    input_seconds: float
    checkpoint_seconds: float
    baseline_bytes: int
    peak_bytes: int


class Clocked:
    """Batches of a prepared loader without end, its epochs one after another, and how long they were waited for.

    `ahead` is that of the task's source.
    """

    def __init__(self, loader: DataLoader[Batch], ahead: Callable[[Iterator[Batch]], Iterator[Batch]]) -> None:
        self.seconds = 0.0
        self._batches = ahead(self._endless(loader))

    def next(self) -> Batch:
        """Return the next batch, on the device."""
        started = time.perf_counter()
        batch = next(self._batches)
        self.seconds += time.perf_counter() - started
        return batch

    def close(self) -> None:
        """Let go of the batches that were read ahead."""
        self._batches = iter(())

    def _endless(self, loader: Any) -> Iterator[Batch]:
        epoch = 0
        while True:
            loader.set_epoch(epoch)
            yield from loader
            epoch += 1


class HeadTrainer:
    """A task under the training's engine and optimiser; `reading_seconds`: of reading target states from a cache."""

    def __init__(self, recipe: HeadsConfig, task: HeadTask, accelerator: Accelerator, num_steps: int) -> None:
        self.task, self.accelerator, self.reading_seconds = task, accelerator, 0.0
        self.max_grad_norm = recipe.optimizer.max_grad_norm
        self.engine = choose_engine(accelerator, recipe.schedule, recipe.optimizer)
        make = partial(make_optimizer, config=recipe.optimizer, num_steps=num_steps)
        self.module, self.optimizer, self.scheduler = self.engine.prepare(task, make)

    def step(self, batch: Batch) -> int:
        """Take one optimiser step; return this process's tokens."""
        accelerator = self.accelerator
        num_labels = accelerator.reduce(batch.loss_mask_BT[:, 1:].sum(), "sum").clamp(min=1)
        started = time.perf_counter()
        states, normalisers = self.task.source.read(batch)
        if self.task.source.reads_ahead:
            self.reading_seconds += time.perf_counter() - started
        with accelerator.autocast():
            result: HeadLoss = self.module(batch, states, num_labels, accelerator.num_processes, normalisers)
        self.engine.backward(result.loss)
        self.engine.clip(self.module, self.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return int((batch.document_ids_BT != NO_DOCUMENT).sum())


def measure_steps(config: ScaleStepsConfig) -> None:
    """Take the steps in this process, together with those launched beside it; the first writes what was measured."""
    recipe = config.recipe
    join_processes(recipe.target, timeout_seconds=recipe.schedule.process_timeout_seconds)
    accelerator = make_accelerator(recipe.schedule, Path(recipe.output))
    baseline = own_bytes()
    materials = load_materials(recipe, accelerator)
    cache = open_training_cache(recipe, materials.dataset, materials.target)
    task = HeadTask(recipe, materials.target, materials.train, materials.held_out, accelerator, cache)
    trainer = HeadTrainer(recipe, task, accelerator, config.warmup_steps + config.steps)
    batches = Clocked(
        accelerator.prepare(make_training_loader(recipe, materials.dataset, num_batches=accelerator.num_processes)),
        task.source.ahead,
    )
    with watching() if config.watch_memory else nullcontext([0]) as peak:
        for _ in range(config.warmup_steps):
            trainer.step(batches.next())
        waited = batches.seconds + trainer.reading_seconds
        accelerator.wait_for_everyone()
        started = time.perf_counter()
        own_tokens = sum(trainer.step(batches.next()) for _ in range(config.steps))
        accelerator.wait_for_everyone()
        seconds = time.perf_counter() - started
    tokens = accelerator.reduce(torch.tensor(own_tokens, device=accelerator.device), "sum")
    measured = Steps(
        num_processes=accelerator.num_processes,
        steps=config.steps,
        seconds=seconds,
        tokens=int(tokens),
        input_seconds=batches.seconds + trainer.reading_seconds - waited,
        checkpoint_seconds=_time_checkpoints(config, trainer),
        baseline_bytes=baseline if config.watch_memory else 0,
        peak_bytes=peak[0],
    )
    if accelerator.is_main_process:
        write_json(Path(config.result), asdict(measured))
    accelerator.end_training()
    batches.close()
    if materials.target.states_from is not None:
        materials.target.states_from.close()


def own_bytes() -> int:
    """Return the memory of this process that is no file's: what is mapped of a cache or of weights belongs to the disk's cache.

    Linux only.
    """
    return 1024 * read_kibibytes("/proc/self/status", "RssAnon")


@contextmanager
def watching() -> Iterator[list[int]]:
    """Yield a list of one number, which becomes the largest `own_bytes` seen until the block ends."""
    peak, ended = [own_bytes()], threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLING_SECONDS):
            peak[0] = max(peak[0], own_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def _time_checkpoints(config: ScaleStepsConfig, trainer: HeadTrainer) -> float:
    """Write checkpoints as training does, and return the seconds of one."""
    if not config.checkpoints:
        return 0.0
    recipe, accelerator = config.recipe, trainer.accelerator
    progress = Progress()
    checkpoints = Checkpoints(
        folder=Path(recipe.output) / "checkpoints",
        module=trainer.module,
        optimizer=trainer.optimizer,
        accelerator=accelerator,
        scheduler=trainer.scheduler,
        lineage=Lineage.of(accelerator, recipe.schedule, recipe.model_dump(mode="json"), {}),
        keep=recipe.schedule.keep_checkpoints,
        progress=progress,
    )
    started = time.perf_counter()
    for number in range(config.checkpoints):
        progress.step = config.steps + number
        checkpoints.save()
    return (time.perf_counter() - started) / config.checkpoints


if __name__ == "__main__":
    sys.exit(
        run_command(ScaleStepsConfig, measure_steps, description="Time a recipe's optimiser steps in one of several processes.")
    )

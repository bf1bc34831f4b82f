"""What the training entries do once their config is loaded: accelerate, target, data, task, loop."""

from __future__ import annotations

import logging
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import ProjectConfiguration, set_seed

from configs.command import DONE
from configs.errors import ConfigError, first_line
from configs.provenance import write_run_record
from configs.schema import DistillConfig, ScheduleConfig
from distill.batches import ConversationDataset, make_loader
from distill.cache import TargetCache, check_fits, open_cache
from distill.conversations import check_written_for, read_conversations
from distill.processes import join_processes
from distill.target import Target, load_target
from train.draft_task import DraftTask
from train.loop import train

log = logging.getLogger("draftsmith")


def run_distillation(config: DistillConfig) -> int:
    """Distil as configured; see `train/distill.py`.

    Raises:
        InputError: data, target, student or cache cannot be had or do not go together, or the output cannot be written.
        RuntimeError: a loss is not finite.
    """
    # Before the accelerator, which would take each of several processes on a CPU for the only one.
    join_processes(config.target)
    accelerator = make_accelerator(config.schedule, Path(config.output))
    if config.target.device not in ("auto", accelerator.device.type, str(accelerator.device)):
        raise ConfigError(
            f"target.device: training runs on {accelerator.device}, where accelerate put this process, got "
            f"{config.target.device}; give auto, and choose GPUs by CUDA_VISIBLE_DEVICES or accelerate's gpu_ids"
        )
    train_path, held_out_path = Path(config.data.train), Path(config.data.held_out)
    train_rows, held_out_rows = read_conversations(train_path), read_conversations(held_out_path)
    target = load_target(config.target.model_copy(update={"device": str(accelerator.device)}))
    for path in (train_path, held_out_path):
        for difference in check_written_for(path, target.identity):
            log.warning(
                "%s was written by a target with other %s; drafts learn best from the target's own answers", path, difference
            )
    dataset = ConversationDataset(train_rows, config.data.max_length)
    if dataset.num_dropped:
        log.info(
            "%d conversations have no answer within %d tokens and were dropped", dataset.num_dropped, config.data.max_length
        )
    loader = make_loader(dataset, config.schedule.batch_size, seed=config.schedule.seed)
    cache = open_training_cache(config, dataset, target)
    task = DraftTask(config, target, train_rows, held_out_rows, accelerator, cache)
    if accelerator.is_main_process:
        write_run_record(Path(config.output), config)
    outcome = train(
        task, loader, config.optimizer, config.schedule, accelerator, Path(config.output), config.model_dump(mode="json")
    )
    log.info(
        "done: %d steps in %.0f s; best tokens per target step on held-out prompts %.3f, at step %d; artifact in %s",
        outcome.steps,
        outcome.seconds,
        outcome.best_score,
        outcome.best_step,
        Path(config.output) / "artifact",
    )
    return DONE


def open_training_cache(config: DistillConfig, dataset: ConversationDataset, target: Target) -> TargetCache | None:
    """Return the cache that a run is to learn from, None where there is to be none.

    Raises:
        InputError: it is not of this target and data, or cannot serve this config.
    """
    if config.data.cache is None:
        return None
    cache = open_cache(Path(config.data.cache), Path(config.data.train), target)
    check_fits(cache, dataset, config)
    return cache


def make_accelerator(schedule: ScheduleConfig, output: Path) -> Accelerator:
    """Return the accelerator of a training run, everything random seeded.

    Raises:
        ConfigError: a tracker is not installed, or the machine does not have the precision.
    """
    available = {tracker.value for tracker in get_available_trackers()}
    for tracker in schedule.trackers:
        if tracker not in available:  # accelerate would leave it out in silence
            raise ConfigError(f"schedule.trackers: {tracker} is not installed; install it, or take it out of the list")
    set_seed(schedule.seed)
    try:
        return Accelerator(
            mixed_precision=schedule.mixed_precision,
            log_with=list(schedule.trackers) or None,
            project_config=ProjectConfiguration(project_dir=str(output), logging_dir=str(output / "trackers")),
            step_scheduler_with_optimizer=False,
        )
    except ValueError as error:
        raise ConfigError(
            f"schedule.mixed_precision: {schedule.mixed_precision} cannot be used: {first_line(error)}"
        ) from error

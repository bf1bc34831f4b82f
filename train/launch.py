"""The training entries after their config is loaded: accelerator, target, data, task, loop."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    patch_environment,
    set_seed,
)
from torch.utils.data import DataLoader
from transformers.integrations import unset_hf_deepspeed_config

from configs.runtime.command import DONE
from configs.runtime.errors import ConfigError, first_line
from configs.runtime.files import drop_leftovers, find_shipped, folder_lock, write_json
from configs.runtime.run_record import write_run_record
from configs.schema.training import DistillConfig, HeadsConfig, ScheduleConfig
from distill.cache.reader import MANIFEST, TargetCache, check_fits, open_cache
from distill.dataset.batches import ConversationDataset, make_loader
from distill.dataset.conversations import (
    Conversation,
    check_held_out,
    check_written_for,
    is_written_by_target,
    open_conversations,
)
from distill.server.states import EngineStates
from heads.device import choose_device, same_device
from heads.frozen.identity import remembered_sha256
from heads.frozen.loading import Target, load_target
from heads.frozen.processes import join_processes, naming_lost_processes
from heads.metadata import hash_artifact, locate_artifact
from heads.modules.interface import Batch
from train.loop.lineage import engine_name
from train.loop.loop import Task, train
from train.loop.surroundings import check_surroundings
from train.loop.telemetry import TRACKERS_FOLDER, check_trackers
from train.preflight import check_before_training
from train.resolve import resolve
from train.tasks.draft import DraftTask
from train.tasks.head import HeadTask

DEEPSPEED_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"  # where accelerate's launcher hands on its config's deepspeed_config_file

log = logging.getLogger("draftsmith")
Recipe = DistillConfig | HeadsConfig


@dataclass(frozen=True, kw_only=True)
class Materials:
    """Target and conversations of a run, loaded and checked against each other, and the recipe with nothing left to them."""

    config: Recipe
    target: Target
    train: Sequence[Conversation]
    held_out: Sequence[Conversation]
    dataset: ConversationDataset


def run_distillation(config: DistillConfig) -> int:
    """Distil as configured (`train/distill.py`); an InputError or RunFailed says why not."""
    return _run(config, DraftTask)


def run_heads(config: HeadsConfig) -> int:
    """Train a head as configured (`train/heads.py`); an InputError or RunFailed says why not."""
    return _run(config, HeadTask)


def _run(config: Recipe, make_task: Callable[..., Task]) -> int:
    # Before the accelerator, which would take each of several processes on a CPU for the only one.
    state = join_processes(config.target, timeout_seconds=config.schedule.process_timeout_seconds)
    output = Path(config.output)
    with ExitStack() as stack:
        if state.is_main_process:
            stack.enter_context(folder_lock(output))
        stack.enter_context(naming_lost_processes())
        check_surroundings(config)
        accelerator = make_accelerator(config.schedule, output)
        if isinstance(config, HeadsConfig) and engine_name(accelerator) == "ZeRO-3":  # which gathers weights by their owners
            raise ConfigError("zero_stage of accelerate's config: heads take 2 at most; take configs/accelerate/zero2.yaml")
        materials = load_materials(config, accelerator)
        config = materials.config
        if materials.target.states_from is not None:
            stack.enter_context(closing(materials.target.states_from))
        return _train(config, make_task, accelerator, materials, output)


def _train(config: Recipe, make_task: Callable[..., Task], accelerator: Accelerator, materials: Materials, output: Path) -> int:
    in_all = accelerator.num_processes * config.schedule.gradient_accumulation_steps
    cache = open_training_cache(config, materials.dataset, materials.target)
    task = make_task(config, materials.target, materials.train, materials.held_out, accelerator, cache)
    loader = task.source.loading(make_training_loader(config, materials.dataset, num_batches=in_all))
    started = time.monotonic()
    if isinstance(task, HeadTask) and task.config.sanity.enabled:
        check_before_training(task, materials.dataset, accelerator)
    sanity_seconds = time.monotonic() - started
    if accelerator.is_main_process:
        drop_leftovers(output / "artifact")
        write_run_record(output, config)
    outcome = train(task, loader, config, accelerator, _hash_materials(config, materials.target))
    path = output / "outcome.json"
    if accelerator.is_main_process and (outcome["labels"] or not path.is_file()):  # that of a run that had ended before stays
        write_json(path, outcome | {"sanity_seconds": sanity_seconds})
    log.info(
        "done: %d steps in %.0f s; best tokens per target step on held-out prompts %.3f, at step %d; artifact in %s",
        *(outcome[name] for name in ("steps", "seconds", "best_score", "best_step")),
        output / "artifact",
    )
    return DONE


def make_training_loader(config: Recipe, dataset: ConversationDataset, *, num_batches: int = 1) -> DataLoader[Batch]:
    """Return the loader of a run's batches, of which an optimiser step has `num_batches` of about as many positions."""
    batch_size, seed, length = config.schedule.batch_size, config.schedule.seed, config.data.row_length
    if isinstance(config, DistillConfig) and config.policy.on_policy:
        num_batches = 1  # of equally many rows: the draft writes on as many in all processes
    return make_loader(dataset, batch_size, seed=seed, num_batches=num_batches, pack_length=length)


def load_materials(config: Recipe, accelerator: Accelerator) -> Materials:
    """Load target and conversations; warn where the data was written by another target."""
    asked = config.target.device
    if asked != "auto" and not same_device(choose_device(asked), accelerator.device):
        raise ConfigError(
            f"target.device: training runs on {accelerator.device}, where accelerate put this process, got "
            f"{asked}; give auto, and choose GPUs by CUDA_VISIBLE_DEVICES or accelerate's gpu_ids"
        )
    train_path, held_out_path = Path(config.data.train), Path(config.data.held_out)
    train_rows, held_out_rows = open_conversations(train_path), open_conversations(held_out_path)
    check_held_out(train_rows, held_out_rows)
    target = load_target(config.target.model_copy(update={"device": str(accelerator.device)}), takes_states=True)
    if config.target.states is not None:
        target = replace(target, states_from=EngineStates(config.target.states, target))
    for path in (train_path, held_out_path):
        for difference in check_written_for(path, target.identity):
            log.warning(
                "%s was written by a target with other %s; drafts learn best from the target's own answers", path, difference
            )
    if not is_written_by_target(train_path):
        log.warning("%s: answers were written by the data set, not by the target: expect lower acceptance", train_path)
    config = resolve(config, target.model, train_rows)
    dataset = ConversationDataset(train_rows, config.data.max_length, config.data.num_conversations)
    if dataset.num_dropped:
        log.info(
            "%d conversations have no answer within %d tokens and were dropped", dataset.num_dropped, config.data.max_length
        )
    if dataset.num_cut:
        log.info("%d of %d conversations are cut at data.max_length, %d", dataset.num_cut, len(dataset), config.data.max_length)
    return Materials(config=config, target=target, train=train_rows, held_out=held_out_rows, dataset=dataset)


def _hash_materials(config: Recipe, target: Target) -> dict[str, str]:
    """Return hashes of what the config's paths hold: both sides of the data, the target's weights, the cache's manifest."""
    hashes = {name: remembered_sha256(Path(getattr(config.data, name))) for name in ("train", "held_out")}
    if config.data.cache is not None:
        hashes["cache"] = hashlib.sha256((Path(config.data.cache) / MANIFEST).read_bytes()).hexdigest()
    if isinstance(config, HeadsConfig) and config.init is not None:
        hashes["init"] = hash_artifact(locate_artifact(config.init))
    return hashes | {"target": target.identity.weights_sha256 or "unknown"}


def open_training_cache(config: Recipe, dataset: ConversationDataset, target: Target) -> TargetCache | None:
    """Return the target cache of a run, checked against its target, data and config; None where the config has none."""
    if config.data.cache is None:
        return None
    cache = open_cache(config.data.cache, Path(config.data.train), target)
    check_fits(cache, dataset)
    return cache


def make_accelerator(schedule: ScheduleConfig, output: Path) -> Accelerator:
    """Return the accelerator of a training run, and seed all random number generators; a ConfigError says what it cannot do."""
    check_trackers(schedule)
    set_seed(schedule.seed)
    # `train.loop.engines` shards the weights, not accelerate, and tells DeepSpeed what the recipe says.
    environment = {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto"}
    environment["ACCELERATE_GRADIENT_CLIPPING"] = "auto"
    if file := os.environ.get(DEEPSPEED_FILE):  # the recipes in configs/accelerate name one beside them, from any folder
        environment[DEEPSPEED_FILE] = str(find_shipped(file))
    try:
        with patch_environment(**environment):
            accelerator = Accelerator(
                mixed_precision=schedule.mixed_precision,
                dynamo_backend="no",
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # losses are sums over a step's labels
                log_with=list(schedule.trackers) or None,
                project_config=ProjectConfiguration(project_dir=str(output), logging_dir=str(output / TRACKERS_FOLDER)),
                step_scheduler_with_optimizer=False,
                kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],  # no copy of the gradients
            )
    except ValueError as error:
        what = f"schedule.mixed_precision: {schedule.mixed_precision}" if "precision" in str(error) else "accelerate's config"
        raise ConfigError(f"{what} cannot be used: {first_line(error)}") from error
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # a line a checkpoint about weights that are tied
    unset_hf_deepspeed_config()  # under ZeRO-3 transformers would shard each model that it loads, also the target
    return accelerator

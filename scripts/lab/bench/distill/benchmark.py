"""The distillation benchmark: the loss's memory and time, training steps, and tau before and after training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import ValidationError

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.errors import ConfigError, InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.training import DistillConfig
from distill.dataset.conversations import read_conversations
from eval.decoder.decode import check_decodable
from eval.stats.bootstrap import Interval, paired_ratio_interval, ratio_interval
from heads.artifact import load_draft
from heads.frozen.loading import load_target
from heads.metadata import read_metadata
from scripts.lab.bench.distill.loss import LossMeasurement, measure_losses
from scripts.lab.bench.distill.training import DistillSetup, compare_cached, compare_with_trl, training_ratios, training_rows
from scripts.lab.bench.harness import write_results
from scripts.lab.bench.peers.trl_gkd import trl_is_installed
from scripts.lab.bench.provenance import check_trained_here, read_outcome, train_all
from scripts.lab.bench.turns import count_rounds
from scripts.lab.measuring import SEED, Counts, columns, to_request
from scripts.lab.settings import BenchDistillConfig
from scripts.lab.trained_runs import TrainingRun, in_own_folder
from train.launch import make_accelerator
from train.loop.checkpoints import Progress

log = logging.getLogger("draftsmith")

UNDISTILLED, DISTILLED = "undistilled", "distilled"
DECODE_BATCH = 8
TEMPERATURES = (0.0, 1.0)


def compare_distillation(config: BenchDistillConfig) -> int:
    training = read_training(config.draft)
    check_trained_here([config.draft], config.output)
    if not trl_is_installed():
        log.info("trl is not installed: its sides are left out (pip install trl==1.16.0)")
    variants = train_variants(config, training)
    losses = measure_losses(config.loss)
    with TemporaryDirectory(prefix="bench-distill-") as scratch:
        setup = load_setup(config, training, Path(scratch))
        cached, beside_trl = compare_cached(setup), compare_with_trl(setup)
        counts = measure_acceptance(setup)
        compared = variant_rows(variants, partial(count_accepted, setup), config.bootstrap_samples)
    samples = config.bootstrap_samples
    write_results(
        config.output,
        "distill",
        config,
        rows=[
            *acceptance_rows(training, counts, samples),
            *losses.rows(),
            *training_rows(setup, cached, beside_trl),
            *compared,
        ],
        ratios={
            **losses.ratios(samples),
            **training_ratios(cached, beside_trl, samples),
            "tau_distilled_vs_undistilled": tau_ratio(counts, samples),
        },
        device=str(setup.target.device),
        threads=torch.get_num_threads(),
    )
    return verdict(losses)


def read_training(draft: str) -> DistillConfig:
    content = read_metadata(Path(draft)).training
    if not content:
        raise InputError(f"draft: {draft} does not say how it was trained; expected an artifact of train/distill.py")
    try:
        return DistillConfig.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the top level"
        raise InputError(
            f"draft: the training config in {draft} is not of this version ({where}: {first['msg']}); distil it again"
        ) from error


def load_setup(config: BenchDistillConfig, training: DistillConfig, scratch: Path) -> DistillSetup:
    """Load what is measured; nothing is written outside `scratch`."""
    training = training.model_copy(
        update={
            "data": training.data.model_copy(update={"cache": None}),
            "schedule": training.schedule.model_copy(update={"trackers": []}),
            "output": str(scratch / UNDISTILLED),
        }
    )
    accelerator = make_accelerator(training.schedule, scratch)
    return DistillSetup(
        config=config,
        training=training,
        target=load_target(training.target.model_copy(update={"device": str(accelerator.device)})),
        train=read_conversations(Path(training.data.train)),
        held_out=read_conversations(Path(training.data.held_out)),
        accelerator=accelerator,
        scratch=scratch,
    )


# --- before and after ---------------------------------------------------------------------------------------------


def measure_acceptance(setup: DistillSetup) -> dict[tuple[str, float], Counts]:
    """Decode the held-out prompts with the draft before and after training; return counts by draft and temperature."""
    task = setup.make_task(setup.training)
    task.save(task.module, Progress(), {})
    folders = {UNDISTILLED: Path(setup.training.output) / "artifact", DISTILLED: Path(setup.config.draft)}
    counts = {name: count_accepted(setup, name, folder) for name, folder in folders.items()}
    return {(name, temperature): each for name, own in counts.items() for temperature, each in own.items()}


def count_accepted(setup: DistillSetup, name: str, artifact: Path) -> dict[float, Counts]:
    """Decode the held-out prompts with a draft; return committed tokens and rounds by prompt at each temperature."""
    requests = [to_request(row) for row in setup.held_out[-setup.config.num_prompts :]]
    check_decodable(setup.target, requests)
    draft = load_draft(artifact, setup.target.identity, setup.target.model)
    counts: dict[float, Counts] = {}
    for temperature in TEMPERATURES:
        settings = DecodeConfig(
            num_speculative_tokens=setup.training.num_speculative_tokens,
            max_new_tokens=setup.config.max_new_tokens,
            batch_size=DECODE_BATCH,
            temperature=temperature,
            verification="token",
        )
        by_prompt = count_rounds(setup.target, requests, settings, draft.proposer, what=f"{name} draft")
        counts[temperature] = [(committed, rounds) for committed, rounds in by_prompt.values()]
        committed, rounds = map(sum, zip(*counts[temperature], strict=True))
        log.info("%s draft at temperature %g: %.3f tokens per target step", name, temperature, committed / rounds)
    return counts


def acceptance_rows(training: DistillConfig, counts: dict[tuple[str, float], Counts], samples: int) -> list[dict[str, Any]]:
    weights = training.loss.weights
    divergence = " + ".join(name if weight == 1 else f"{weight:g} {name}" for name, weight in weights.items())
    return [
        {
            "draft": name,
            "divergence": divergence if name == DISTILLED else None,
            "data_policy": "target-written answers" if name == DISTILLED else None,
            "temperature": temperature,
            "num_speculative_tokens": training.num_speculative_tokens,
            "prompts": len(each),
            "tau": ratio_interval(*columns(each), samples=samples, seed=SEED),
        }
        for (name, temperature), each in counts.items()
    ]


def tau_ratio(counts: dict[tuple[str, float], Counts], samples: int) -> Interval:
    """Return the distilled draft's greedy tokens per target step over the undistilled one's, paired by prompt."""
    after, before = (columns(counts[name, 0.0]) for name in (DISTILLED, UNDISTILLED))
    return paired_ratio_interval(*after, *before, samples=samples, seed=SEED)


def verdict(losses: LossMeasurement) -> int:
    """Return the exit code: a ratio of the times of two different computations would mean nothing."""
    if losses.agrees:
        return DONE
    for divergence, by_side in losses.values.items():
        log.error("%s by side: %s", divergence, ", ".join(f"{side} {value}" for side, value in by_side.items()))
    log.error("the sides do not compute the same loss")
    return GATE_FAILED


# --- recipes beside each other ---------------------------------------------------------------------------------------


def train_variants(config: BenchDistillConfig, training: DistillConfig) -> list[TrainingRun]:
    runs = [_run(config, training, name) for name in config.variants]
    check_trained_here([run.artifact for run in runs if run.is_trained], config.output)
    train_all(runs, "recipe")
    return runs


def variant_rows(
    runs: Sequence[TrainingRun], counts_of: Callable[[str, Path], Mapping[float, Counts]], samples: int
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    first: Mapping[float, Counts] = {}
    for run in runs:
        counts = counts_of(run.name, run.artifact)
        first = first or counts
        outcome = read_outcome(run)
        row: dict[str, Any] = {"recipe": run.name}
        row |= {f"tau_t{heat:g}": ratio_interval(*columns(each), samples=samples, seed=SEED) for heat, each in counts.items()}
        row |= {
            f"tau_t{heat:g}_vs_first": paired_ratio_interval(*columns(each), *columns(first[heat]), samples=samples, seed=SEED)
            for heat, each in counts.items()
        }
        rows.append(row | {"training_seconds": outcome["training_seconds"], "labels": int(outcome["labels"])})
    return rows


def _run(config: BenchDistillConfig, training: DistillConfig, name: str) -> TrainingRun:
    values = training.model_dump()
    values["schedule"]["max_steps"] = config.variant_steps
    values["held_out"]["num_prompts"] = 8
    try:
        recipe = DistillConfig.model_validate(values | config.variants[name])
    except ValidationError as error:
        raise ConfigError(f"variants.{name}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    return TrainingRun(name=name, recipe=in_own_folder(recipe, Path(config.runs), name))

"""The distillation benchmark's recipes beside each other: the draft's own with one section changed, each trained briefly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.runtime.errors import ConfigError
from configs.schema.training import DistillConfig
from eval.stats.bootstrap import paired_ratio_interval, ratio_interval
from scripts.advice.measuring import SEED, Counts, columns
from scripts.advice.trained_runs import TrainingRun, in_own_folder
from scripts.lab.bench.provenance import read_outcome, train_all
from scripts.lab.settings import BenchDistillConfig

TEMPERATURES = (0.0, 1.0)


def train_variants(config: BenchDistillConfig, training: DistillConfig) -> list[TrainingRun]:
    runs = [_run(config, training, name) for name in config.variants]
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
        rows.append(row | {"training_seconds": outcome["seconds"], "labels": int(outcome["labels"])})
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

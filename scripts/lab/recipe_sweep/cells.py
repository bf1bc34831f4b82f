"""The cells of a sweep: what each is called, and its recipe. How one is trained and kept is in `bench.trained_runs`.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from configs.runtime.errors import ConfigError
from configs.schema.training import DistillConfig
from scripts.lab.bench.trained_runs import TrainingRun, in_own_folder, load_changed
from scripts.lab.recipe_sweep.settings import SweepConfig

UNDISTILLED = "undistilled"


@dataclass(frozen=True, kw_only=True)
class Cell(TrainingRun):
    """One recipe of the sweep.

    divergence, data_policy: its names in the sweep's config; of the draft before training, `UNDISTILLED` and None.
    """

    recipe: DistillConfig
    divergence: str
    data_policy: str | None


def make_cells(config: SweepConfig) -> tuple[Cell, list[Cell]]:
    """Return the draft before training as a cell, and the cells to train, in the order of `config.pairs`."""
    shared = load_recipe(config)
    cells = [make_cell(config, shared, divergence, policy) for divergence, policy in config.pairs]
    undistilled = in_own_folder(shared, Path(config.output) / "cells", UNDISTILLED)
    return Cell(name=UNDISTILLED, divergence=UNDISTILLED, data_policy=None, recipe=undistilled), cells


def load_recipe(config: SweepConfig) -> DistillConfig:
    """Return the recipe that all cells share, the sweep's `settings` in it."""
    return load_changed(DistillConfig, config.distill, config.settings, "settings")


def make_cell(config: SweepConfig, shared: DistillConfig, divergence: str, policy: str) -> Cell:
    """Return the cell of one divergence and one data policy."""
    swept = config.policies[policy]
    values = shared.model_dump()
    values["loss"] = config.divergences[divergence].model_dump()
    values["policy"] = swept.model_dump(exclude={"train"})
    values["data"]["train"] = swept.train or shared.data.train
    try:
        recipe = DistillConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"cell {divergence} on {policy}: {first['msg'].removeprefix('Value error, ')}") from error
    return Cell(
        name=f"{divergence} on {policy}",
        divergence=divergence,
        data_policy=policy,
        recipe=in_own_folder(recipe, Path(config.output) / "cells", f"{divergence}.{policy}"),
    )

"""A training of a comparison: the folder it lives in, its process, what is kept of it. Imports no torch.

A folder bears a hash of recipe and data, not of the code: a finished run is found again only where neither has changed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from configs.runtime.command import BAD_INPUT
from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import CHECKOUT, sha256_of, write_json
from configs.runtime.loading import as_overrides, load_config
from configs.runtime.run_record import training_fingerprint
from configs.schema.base import Value
from configs.schema.training import DistillConfig, HeadsConfig

ENTRIES = {DistillConfig: CHECKOUT / "train" / "distill.py", HeadsConfig: CHECKOUT / "train" / "heads.py"}
OUTCOME = "outcome.json"  # written by the training when it has ended

Recipe = DistillConfig | HeadsConfig
R = TypeVar("R", bound=DistillConfig | HeadsConfig)


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A training, done or to be done; the recipe's `output` is its folder (`in_own_folder`)."""

    name: str
    recipe: Recipe

    @property
    def folder(self) -> Path:
        return Path(self.recipe.output)

    @property
    def artifact(self) -> Path:
        """The trained draft."""
        return self.folder / "artifact"

    @property
    def is_trained(self) -> bool:
        """Whether its training has come to its end."""
        return (self.folder / OUTCOME).is_file()


def load_changed(schema: type[R], path: str, changes: Mapping[str, Value], where: str) -> R:
    """Return the recipe of a file with other values for some dotted keys; errors name `where` the changes were asked for."""
    try:
        return load_config(schema, path, as_overrides(changes))
    except ConfigError as error:
        complaint = str(error)
        section = f"{where}." if complaint.startswith("--set ") else ""
        raise ConfigError(section + complaint.removeprefix("--set ")) from error


def in_own_folder(recipe: R, parent: Path, name: str) -> R:
    """Return a recipe that trains from the start, in a folder under `parent` named after what decides the weights."""
    schedule = recipe.schedule.model_copy(update={"resume": False})
    contents = {
        "train": sha256_of(Path(recipe.data.train)),
        "held_out": sha256_of(Path(recipe.data.held_out)),
        "micro_batches_per_step": str(schedule.gradient_accumulation_steps),
    }
    folder = parent / f"{name}-{training_fingerprint(recipe.model_dump(mode='json'), contents)[:12]}"
    return cast(R, recipe.model_copy(update={"schedule": schedule, "output": str(folder)}))


def train_run(run: TrainingRun, kind: str) -> None:
    """Train from the start, in a process of its own; only what is needed to decode with the draft stays."""
    path = run.folder / "recipe.json"
    write_json(path, run.recipe.model_dump(mode="json"))
    code = run_training(ENTRIES[type(run.recipe)], path)
    ended = f"{kind} {run.name}: its training (recipe {path}) ended with code {code}, see above"
    if code == BAD_INPUT:
        raise InputError(ended)
    if code:
        raise RuntimeError(f"{ended}; started again, this command goes on with this {kind}")
    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)  # optimiser states, several times the draft's size


def run_training(entry: Path, recipe: Path) -> int:
    """Train by a recipe in a fresh process, whose memory and random state are its own; return its exit code."""
    return subprocess.run([sys.executable, str(entry), "--config", str(recipe)], check=False).returncode

"""Training runs that a comparison is made of: the folder each lives in, its training in a process of its own, what is kept.

A run's folder bears a hash of its recipe and of its data files, so that a finished run is found again exactly where nothing
that decides its weights has changed, and none is ever written over. The hash knows nothing of the code: where a kept run was
trained at another commit, that is said. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from configs.runtime.command import BAD_INPUT
from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import CHECKOUT, read_json, sha256_of, write_json
from configs.runtime.loading import load_config
from configs.runtime.run_record import describe_git, training_fingerprint
from configs.schema.commands.recipe_changes import Value
from configs.schema.training import DistillConfig, HeadsConfig

log = logging.getLogger("draftsmith")

ENTRIES = {DistillConfig: CHECKOUT / "train" / "distill.py", HeadsConfig: CHECKOUT / "train" / "heads.py"}
RECIPE = "recipe.json"
OUTCOME = "outcome.json"  # written by the training when it has ended
NEEDED = {"seconds", "training_seconds", "labels", "trained_parameters"}  # of an outcome

Recipe = DistillConfig | HeadsConfig
R = TypeVar("R", bound=DistillConfig | HeadsConfig)


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A training, done or to be done; the recipe's `output` is its folder (`in_own_folder`)."""

    name: str
    recipe: Recipe

    @property
    def folder(self) -> Path:
        """Where everything of the run is kept."""
        return Path(self.recipe.output)

    @property
    def artifact(self) -> Path:
        """The trained draft."""
        return self.folder / "artifact"

    @property
    def is_trained(self) -> bool:
        """Whether its training has come to its end."""
        return (self.folder / OUTCOME).is_file()

    def read_outcome(self) -> dict[str, Any]:
        """Return how the training ended: `train.loop.loop.TrainingResult` as a dict."""
        outcome = read_json(self.folder / OUTCOME, "outcome of a training")
        if not isinstance(outcome, dict) or not outcome.keys() >= NEEDED:
            raise InputError(f"{self.folder / OUTCOME} does not say {', '.join(sorted(NEEDED))}; remove {self.folder}")
        return outcome

    def read_git(self) -> dict[str, Any]:
        """Return the state of the code that it was trained by."""
        metadata = read_json(self.artifact / "draftsmith.json", "artifact metadata")
        git: dict[str, Any] = metadata["provenance"]["git"]
        return git


def load_changed(schema: type[R], path: str, changes: Mapping[str, Value], where: str) -> R:
    """Return the recipe of a file with other values for some dotted keys; errors name `where` the changes were asked for."""
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in changes.items()]
    try:
        return load_config(schema, path, overrides)
    except ConfigError as error:
        complaint = str(error)
        section = f"{where}." if complaint.startswith("--set ") else ""
        raise ConfigError(section + complaint.removeprefix("--set ")) from error


def in_own_folder(recipe: R, parent: Path, name: str) -> R:
    """Return a recipe with its output in a folder under `parent`, named after what decides the weights.

    A run that was cut off begins anew (`schedule.resume` is off), so that the time it took is all of it.
    """
    schedule = recipe.schedule.model_copy(update={"resume": False})
    contents = {
        "train": sha256_of(Path(recipe.data.train)),
        "held_out": sha256_of(Path(recipe.data.held_out)),
        "micro_batches_per_step": str(schedule.gradient_accumulation_steps),
    }
    folder = parent / f"{name}-{training_fingerprint(recipe.model_dump(mode='json'), contents)[:12]}"
    return cast(R, recipe.model_copy(update={"schedule": schedule, "output": str(folder)}))


def train_all(runs: Sequence[TrainingRun], kind: str) -> None:
    """Train the runs that are not trained, one after another; `kind` is what messages call one, e.g. "cell"."""
    commit = describe_git()["commit"]
    for number, run in enumerate(runs, 1):
        place = f"{kind} {number} of {len(runs)}, {run.name}"
        if not run.is_trained:
            log.info("%s: training", place)
            train_run(run, kind)
        elif (made_at := run.read_git()["commit"]) == commit:
            log.info("%s: kept from %s", place, run.folder)
        else:
            log.warning("%s: kept from %s, trained at commit %s; remove the folder to train anew", place, run.folder, made_at)


def train_run(run: TrainingRun, kind: str) -> None:
    """Train from the start, in a process of its own; only what is needed to decode with the draft stays."""
    path = run.folder / RECIPE
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

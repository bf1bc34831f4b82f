"""The heads that benchmarks compare: recipes that can be compared, data and cache made once for all, and their training."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.runtime.command import BAD_INPUT
from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import CHECKOUT, read_json
from configs.runtime.loading import load_config
from configs.schema.data import CacheConfig, DataConfig
from configs.schema.training import HeadsConfig
from distill.cache.format import MANIFEST as CACHE_MANIFEST
from distill.dataset.conversations import MANIFEST
from scripts.lab.bench.provenance import check_trained_here, train_all
from scripts.lab.head_settings import BenchHeadsConfig, HeadsSettings
from scripts.lab.trained_runs import Recipe, TrainingRun, in_own_folder


def train_recipes(config: BenchHeadsConfig, *, output: str | None = None) -> list[TrainingRun]:
    """Train what is not trained yet, its data and cache made before, and return all runs."""
    recipes = read_recipes(config)
    check_comparable(list(recipes.values()))
    make_data(config)
    make_cache(config)
    runs = [
        TrainingRun(name=name, recipe=in_own_folder(with_cache(recipe, config.cache), Path(config.runs), name))
        for name, recipe in recipes.items()
    ]
    check_trained_here([run.artifact for run in runs if run.is_trained], output or config.output)
    train_all(runs, "recipe")
    return runs


def read_recipes(config: BenchHeadsConfig) -> dict[str, HeadsConfig]:
    """Return the recipes by the names of their files, of which each must have its own."""
    names = [Path(path).stem for path in config.recipes]
    if not names:
        raise ConfigError("recipes: there is none; name at least one file of configs/heads")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"recipes: two are called {twice[0]}; give each a file name of its own")
    return {name: load_config(HeadsConfig, path) for name, path in zip(names, config.recipes, strict=True)}


def check_comparable(recipes: Sequence[Recipe]) -> None:
    """Refuse recipes that a table would compare wrongly: on other targets, or on prompts that another was trained on."""
    first = recipes[0]
    for other in recipes[1:]:
        for where, one, another in (
            ("target", first.target, other.target),
            ("data.train", first.data.train, other.data.train),
            ("data.held_out", first.data.held_out, other.data.held_out),
        ):
            if one != another:
                raise ConfigError(f"recipes: all must have the same {where}, got {one} and {another}")


def make_data(config: HeadsSettings) -> None:
    """Make the data where they are not there; an InputError where those that are were made by another config."""
    if config.data is None:
        return
    asked = load_config(DataConfig, config.data)
    manifest = Path(asked.output) / MANIFEST
    if not manifest.is_file():
        _run_script("data", config.data)
    elif DataConfig.model_validate(read_json(manifest, "manifest of the data")["config"]) != asked:
        raise InputError(f"data: {asked.output} was made by another config than {config.data}; remove it, and it is made anew")


def make_cache(config: HeadsSettings) -> None:
    if config.cache is not None and not (Path(load_config(CacheConfig, config.cache).output) / CACHE_MANIFEST).exists():
        _run_script("cache", config.cache)


def with_cache(recipe: HeadsConfig, cache: str | None) -> HeadsConfig:
    """Return a recipe that reads the cache."""
    if cache is None:
        return recipe
    folder = load_config(CacheConfig, cache).output
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"cache": folder})})


def _run_script(name: str, config: str) -> None:
    command = [sys.executable, str(CHECKOUT / "scripts" / f"{name}.py"), "--config", config]
    code = subprocess.run(command, check=False).returncode
    if code:
        error = InputError if code == BAD_INPUT else RuntimeError
        raise error(f"scripts/{name}.py --config {config} ended with code {code}, see above")

"""Heads on one target and one set of data, each as `eval/run.py` measures it: `python -m scripts.bench.heads [--config FILE]`.

Makes data and cache, trains each recipe and evaluates it, by the commands a person would give, where that was not done. With
`points` also by the share of the data: the curve of tokens per target step over answer tokens, and the law through it
(`scripts.bench.curve`). A night, the first time.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from configs.runtime.command import DONE, GATE_FAILED, run_command
from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import read_json
from configs.runtime.loading import load_config
from configs.schema.base import PositiveInt, PositiveShare, Settings, Temperature
from configs.schema.data import CacheConfig, DataConfig
from configs.schema.evaluation import FreeDraft, SuiteConfig
from configs.schema.training import HeadsConfig
from distill.dataset.batches import ConversationDataset
from distill.dataset.conversations import read_conversations
from scripts.bench.curve import Measured, fit_rows
from scripts.bench.harness import run_config, run_module, write_results

log = logging.getLogger("draftsmith")

HOME_SUITE = "home"  # what tables call held-out prompts of the kinds that the drafts were trained on


class CurvePoint(Settings):
    """A training of the curve."""

    share: PositiveShare  # of the conversations
    epochs: PositiveInt | None = None  # None: the recipe's own


class HeadsBenchConfig(Settings):
    """`python -m scripts.bench.heads`: heads trained on one target and one set of data, and what they are decoded on."""

    data: str | None = "configs/data/heads.yaml"  # of `draftsmith data`, run where its output is not there; None: never
    cache: str | None = "configs/cache/heads.yaml"  # of `draftsmith cache`; None: the target runs on every batch
    recipes: list[str] = ["configs/heads/hydra.yaml", "configs/heads/eagle3.yaml"]  # of `train/heads.py`
    runs: str = "runs/heads/bench"  # folder: what was trained and measured, kept for the next time
    points: list[CurvePoint] = []  # every recipe is trained at each; []: with all of the data, and no curve is drawn
    num_prompts: PositiveInt = 48  # held-out ones, the last of the file: the first chose the checkpoints
    suites: list[SuiteConfig] = [SuiteConfig(name="house", num_prompts=48)]  # decoded as well
    temperature: Temperature = 0.0
    trees: dict[str, list[PositiveInt]] | None = None  # by recipe's name: the branching of a static tree it also drafts
    baselines: list[FreeDraft] = ["prompt_lookup", "suffix_lookup"]  # measured beside the first head
    max_new_tokens: PositiveInt = 64
    batch_size: PositiveInt = 1  # of decoding; tokens per target step do not depend on it
    repeats: PositiveInt = 1  # timed runs of every prompt
    output: str = "docs/results/heads.json"


class Run(NamedTuple):
    """A training of a recipe."""

    name: str
    recipe: str
    config: HeadsConfig
    dataset: ConversationDataset

    @property
    def folder(self) -> Path:
        return Path(self.config.output)


def compare_heads(config: HeadsBenchConfig) -> int:
    recipes = read_recipes(config)
    if config.data is not None and not _is_made(load_config(DataConfig, config.data).output):
        run_module("scripts.data", "--config", config.data)
    if config.cache is not None and not _is_made(load_config(CacheConfig, config.cache).output):
        run_module("scripts.cache", "--config", config.cache)
    suites = write_suites(config, next(iter(recipes.values())))
    rows: list[dict[str, Any]] = []
    measured: list[Measured] = []
    for run in list_runs(config, recipes):
        if not (run.folder / "outcome.json").is_file():
            run_config("train.heads", run.folder, run.config.model_dump(mode="json"))
        tree = (config.trees or {}).get(run.recipe)
        ways = {"": None, **({", tree": tree} if tree else {})}
        for suffix, branching in ways.items():
            folder = run.folder.with_name(f"{run.name}-eval{'-tree' if branching else ''}-t{config.temperature:g}")
            if not (folder / "report.json").is_file():
                evaluation = evaluation_of(config, run, suites, branching, baselines=config.baselines if not rows else [])
                run_config("eval.run", folder, evaluation)
            report = read_json(folder / "report.json", "report")
            rows += list(rows_of(run, report, suffix))
            if branching is None and config.points:
                measured += list(read_counts(run, report, folder))
    curve = fit_rows(measured)
    name = "curve" if config.points else "heads"
    write_results(
        config.output, name, rows=curve or sorted(rows, key=lambda row: row["recipe"] is None), ratios={}, config=config
    )
    wrong = [row for row in rows if row["lossless"] == "not_lossless"]
    for row in wrong:
        log.error("%s: its answers differ from plain decoding's by more than a numerical tie", row["recipe"] or row["family"])
    return GATE_FAILED if wrong else DONE


def _is_made(output: str) -> bool:
    return (Path(output) / "manifest.json").is_file()


def read_recipes(config: HeadsBenchConfig) -> dict[str, HeadsConfig]:
    """Return the recipes by the names of their files; they must be of one target and one set of data to be compared."""
    recipes = {Path(path).stem: load_config(HeadsConfig, path) for path in config.recipes}
    if len(recipes) < len(config.recipes) or not recipes:
        raise ConfigError(f"recipes: expected at least one, each with a file name of its own, got {config.recipes}")
    if len({(each.target, each.data.train, each.data.held_out) for each in map(_hashable, recipes.values())}) > 1:
        raise ConfigError(f"recipes: all must have the same target, data.train and data.held_out, got {config.recipes}")
    return recipes


def _hashable(recipe: HeadsConfig) -> Any:
    return recipe.model_copy(update={"target": recipe.target.model_dump_json()})


def list_runs(config: HeadsBenchConfig, recipes: Mapping[str, HeadsConfig]) -> Iterator[Run]:
    """Yield the trainings, the smallest share of the data first."""
    for point in sorted(config.points or [CurvePoint(share=1)], key=lambda point: point.share):
        for name, recipe in recipes.items():
            rows = read_conversations(Path(recipe.data.train))
            number = None if point.share == 1 else max(1, round(point.share * len(rows)))
            own = name if number is None else f"{name}-{number}"
            cache = None if config.cache is None else load_config(CacheConfig, config.cache).output
            data = recipe.data.model_copy(update={"num_conversations": number, "cache": cache})
            schedule = recipe.schedule.model_copy(update={"epochs": point.epochs or recipe.schedule.epochs})
            changes = {"data": data, "schedule": schedule, "output": str(Path(config.runs) / own)}
            dataset = ConversationDataset(rows, int(recipe.data.max_length), number)
            yield Run(own, name, recipe.model_copy(update=changes), dataset)


def write_suites(config: HeadsBenchConfig, recipe: HeadsConfig) -> list[dict[str, Any]]:
    """Write the suite of held-out prompts, none of which chose a checkpoint; return the configs of all suites."""
    rows = read_conversations(Path(recipe.data.held_out))
    choosing = {row.prompt_id for row in rows[: recipe.held_out.num_prompts]}
    left = [row for row in rows if row.prompt_id not in choosing and row.turn == 0]
    if len(left) < config.num_prompts:
        raise InputError(f"num_prompts: {recipe.data.held_out} has {len(left)} prompts that chose no checkpoint")
    path = Path(config.runs) / f"{HOME_SUITE}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row.to_line() for row in left[-config.num_prompts :]), encoding="utf-8")
    return [{"name": HOME_SUITE, "path": str(path)}, *(each.model_dump(mode="json") for each in config.suites)]


def evaluation_of(
    config: HeadsBenchConfig,
    run: Run,
    suites: Sequence[dict[str, Any]],
    branching: list[int] | None,
    *,
    baselines: list[FreeDraft],
) -> dict[str, Any]:
    decode = {"max_new_tokens": config.max_new_tokens, "batch_size": config.batch_size, "temperature": config.temperature}
    drafts = run.config.num_speculative_tokens
    tree = {} if branching is None else {"tree": {"kind": "static", "branching": branching}}
    return {
        "target": run.config.target.model_dump(mode="json"),
        "draft": str(run.folder / "artifact"),
        "suites": list(suites),
        "decode": decode | tree | {"num_speculative_tokens": max(drafts, len(branching or []))},
        "repeats": config.repeats,
        "baselines": baselines,
        "generate_prompts": 0,
        "lookup_answers": run.config.data.train,
    }


def rows_of(run: Run, report: Mapping[str, Any], suffix: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each suite and each way that was measured on it."""
    outcome = read_json(run.folder / "outcome.json", "outcome of a training")
    cost = {"answer_tokens": run.dataset.num_labels, "labels": outcome["labels"]}
    cost |= {"training_seconds": outcome["training_seconds"], "lossless": report["lossless"]["verdict"]}
    kind = report["draft"]["kind"]
    for suite, section in by_suite(report).items():
        names = {"suite": suite, "prompts": section["prompts"]["num_prompts"]}
        acceptance, speed = section["acceptance"], section["speed"] or {}
        yield {"family": kind, "recipe": run.name + suffix, **names, **figures(acceptance, speed), **cost}
        others = {name: each for name, each in section["baselines"].items() if name != "autoregressive"}
        if section.get("with_lookup"):
            others[f"suffix_lookup + {kind}"] = section["with_lookup"]
        for name, each in others.items():
            recipe = run.name + suffix if kind in name else None
            yield {"family": name, "recipe": recipe, **names, **figures(each, each), **dict.fromkeys(cost), "lossless": None}


def by_suite(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {report["prompts"]["suite"]: report, **report["suites"]}


def figures(acceptance: Mapping[str, Any], speed: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, key, section in (("tau", "tokens_per_target_step", acceptance), ("speedup", "decode_speedup", speed)):
        low, high = section.get(f"{key}_ci") or (None, None)
        found |= {name: section.get(key), f"{name}_low": low, f"{name}_high": high}
    rates = acceptance.get("position_conditional") or []
    return found | {"alpha_by_position": " / ".join("–" if rate is None else f"{rate:.2f}" for rate in rates)}


def read_counts(run: Run, report: Mapping[str, Any], folder: Path) -> Iterator[Measured]:
    """Yield what the records of an evaluation count by prompt, for the curve."""
    counts: dict[str, list[int]] = {}
    for line in (folder / "records.jsonl").read_text(encoding="utf-8").splitlines():
        generation = json.loads(line).get("generation")
        if generation and generation["mode"] == "speculative":
            own = counts.setdefault(generation["prompt_id"], [0, 0])
            own[0] += sum(generation["rounds"]["committed"])
            own[1] += len(generation["rounds"]["committed"])
    outcome = read_json(run.folder / "outcome.json", "outcome of a training")
    for suite, section in by_suite(report).items():
        yield Measured(
            family=report["draft"]["kind"],
            recipe=run.recipe,
            suite=suite,
            answer_tokens=run.dataset.num_labels,
            epochs=run.config.schedule.epochs,
            training_seconds=outcome["training_seconds"],
            most=report["decode"]["num_speculative_tokens"] + 1,
            counts=[(counts[name][0], counts[name][1]) for name in section["prompts"]["ids"]],
        )


if __name__ == "__main__":
    sys.exit(run_command(HeadsBenchConfig, compare_heads, description=__doc__))

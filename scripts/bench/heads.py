"""Heads on one target and one set of data, each as `eval/run.py` measures it: `python -m scripts.bench.heads [--config FILE]`.

Makes data and cache, trains each recipe and evaluates it, by the commands a person would give, where that was not done. With
`points` also by the share of the data: the curve of tokens per target step over answer tokens, and the law through it. A night,
the first time.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.runtime.command import DONE, GATE_FAILED, run_command
from configs.runtime.errors import ConfigError
from configs.runtime.files import read_json
from configs.runtime.loading import load_config
from configs.schema.base import PositiveInt, PositiveShare, Settings, Temperature
from configs.schema.data import CacheConfig, DataConfig
from configs.schema.evaluation import FreeDraft, SuiteConfig
from configs.schema.training import HeadsConfig
from distill.dataset.batches import ConversationDataset
from distill.dataset.conversations import read_conversations
from scripts.bench.harness import by_suite, evaluate, figures, free_ways, held_out_rows, run_config, run_module, write_results

log = logging.getLogger("draftsmith")

MIN_GAP = 1e-6
DOUBLINGS = (2, 4)  # of the most answer tokens that were trained on: what so many would bring is predicted
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
    baselines: list[FreeDraft] = ["prompt_lookup", "suffix_lookup"]  # measured beside the first head
    max_new_tokens: PositiveInt = 64
    batch_size: PositiveInt = 1  # of decoding; tokens per target step do not depend on it
    output: str = "docs/results/heads.json"


class Run(NamedTuple):
    """A training of a recipe."""

    name: str
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
    for run in list_runs(config, recipes):
        if not (run.folder / "outcome.json").is_file():
            run_config("train.heads", run.folder, run.config.model_dump(mode="json"))
        folder = run.folder.with_name(f"{run.name}-eval-t{config.temperature:g}")
        if not (folder / "report.json").is_file():
            evaluate(folder, evaluation_of(config, run, suites, baselines=config.baselines if not rows else []))
        rows += list(rows_of(run, read_json(folder / "report.json", "report")))
    wrong = [row for row in rows if row["lossless"] == "not_lossless"]
    rows = curve_of(rows) if config.points else sorted(rows, key=lambda row: row["recipe"] is None)
    write_results(config.output, "curve" if config.points else "heads", rows=rows, ratios={}, config=config)
    for row in wrong:
        log.error("%s: its answers differ from plain decoding's by more than a numerical tie", row["recipe"] or row["family"])
    return GATE_FAILED if wrong else DONE


def _is_made(output: str) -> bool:
    return (Path(output) / "manifest.json").is_file()


def read_recipes(config: HeadsBenchConfig) -> dict[str, HeadsConfig]:
    """Return the recipes by the names of their files; the target and the data of the first are those of all."""
    recipes = {Path(path).stem: load_config(HeadsConfig, path) for path in config.recipes}
    if len(recipes) < len(config.recipes) or not recipes:
        raise ConfigError(f"recipes: expected at least one, each with a file name of its own, got {config.recipes}")
    return recipes


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
            yield Run(own, recipe.model_copy(update=changes), dataset)


def write_suites(config: HeadsBenchConfig, recipe: HeadsConfig) -> list[dict[str, Any]]:
    """Write the suite of held-out prompts, none of which chose a checkpoint; return the configs of all suites."""
    path = Path(config.runs) / f"{HOME_SUITE}.jsonl"
    rows = held_out_rows(recipe.data.held_out, config.num_prompts, choosing=recipe.held_out.num_prompts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row.to_line() for row in rows), encoding="utf-8")
    return [{"name": HOME_SUITE, "path": str(path)}, *(each.model_dump(mode="json") for each in config.suites)]


def evaluation_of(
    config: HeadsBenchConfig, run: Run, suites: Sequence[dict[str, Any]], *, baselines: list[FreeDraft]
) -> dict[str, Any]:
    decode = {"max_new_tokens": config.max_new_tokens, "batch_size": config.batch_size, "temperature": config.temperature}
    return {
        "target": run.config.target.model_dump(mode="json"),
        "draft": str(run.folder / "artifact"),
        "suites": list(suites),
        "decode": decode | {"num_speculative_tokens": run.config.num_speculative_tokens},
        "repeats": 1,
        "baselines": baselines,
        "lookup_answers": run.config.data.train,
    }


def rows_of(run: Run, report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each suite and each way that was measured on it."""
    outcome = read_json(run.folder / "outcome.json", "outcome of a training")
    cost = {"answer_tokens": run.dataset.num_labels, "epochs": run.config.schedule.epochs, "labels": outcome["labels"]}
    cost |= {"num_speculative_tokens": report["decode"]["num_speculative_tokens"]}
    cost |= {"training_seconds": outcome["training_seconds"], "lossless": report["lossless"]["verdict"]}
    kind = report["draft"]["kind"]
    for suite, section in by_suite(report).items():
        names = {"suite": suite, "prompts": section["prompts"]["num_prompts"]}
        yield {"family": kind, "recipe": run.name, **names, **figures(section["acceptance"], section["speed"]), **cost}
        for name, each in free_ways(section, kind).items():
            recipe = run.name if kind in name else None
            yield {"family": name, "recipe": recipe, **names, **figures(each, each), **dict.fromkeys(cost), "lossless": None}


def curve_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the heads' rows with what the law through their curve leaves over, and a row for each law.

    A curve is of a family on a suite. What a round misses to its most tokens falls as a power of the answer tokens trained on,
    `most - tau = c * tokens ** -exponent` (Kaplan et al. 2020, arXiv 2001.08361), fitted by least squares on logarithms.
    """
    curves: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["answer_tokens"] is not None:
            curves.setdefault((row["family"], row["suite"]), []).append({"row": "measured", **row})
    laws = []
    for (family, suite), own in curves.items():
        if len(own) == 1:
            continue
        most = own[0]["num_speculative_tokens"] + 1
        tokens_K, taus_K = (np.array([row[name] for row in own], float) for name in ("answer_tokens", "tau"))
        slope, height = np.polyfit(np.log(tokens_K), np.log(np.maximum(most - taus_K, MIN_GAP)), 1)
        law: dict[str, Any] = {"row": "law", "family": family, "suite": suite, "exponent": -float(slope)}
        for times in DOUBLINGS:
            law[f"tau_at_{times}_times"] = most - float(np.exp(height + slope * np.log(times * tokens_K.max())))
        for row, left in zip(own, taus_K - most + np.exp(height + slope * np.log(tokens_K)), strict=True):
            row["less_law"] = float(left)
        laws.append(law)
    return [*(row for own in curves.values() for row in own), *laws]


if __name__ == "__main__":
    sys.exit(run_command(HeadsBenchConfig, compare_heads, description=__doc__))

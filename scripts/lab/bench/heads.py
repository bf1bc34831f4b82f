"""The head benchmark: recipes in, a table of families out, each measured as `eval/run.py` measures, at batch 1."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from configs.runtime.command import DONE, GATE_FAILED
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import StaticTree
from configs.schema.evaluation import EvalConfig, FreeDraft
from distill.dataset.batches import ConversationDataset
from distill.dataset.conversations import read_conversations
from eval.decoder.decode import Request
from eval.decoder.records import AUTOREGRESSIVE, WITH_LOOKUP
from eval.lossless.teacher_forcing import Readings
from eval.lossless.verdict import NOT_LOSSLESS, judge_lossless
from eval.measure.interleaved import drafts_by_mode
from eval.measure.proposers import Answers, add_lookup, known_answers, make_baselines
from eval.measure.record_files import Records
from eval.metrics.acceptance import Acceptance
from eval.stats.bootstrap import Interval
from heads.artifact import Draft, load_draft
from heads.frozen.loading import Target
from heads.metadata import WEIGHTS_FILE, read_metadata
from scripts.lab.bench.harness import flat, write_results
from scripts.lab.bench.head_recipes import train_recipes
from scripts.lab.bench.provenance import read_git, read_outcome
from scripts.lab.bench.suites import open_suites
from scripts.lab.bench.tables import NOT_AVAILABLE
from scripts.lab.bench.turns import measure, speedup
from scripts.lab.head_settings import BenchHeadsConfig
from scripts.lab.measuring import SEED, check_finite
from scripts.lab.trained_runs import TrainingRun

log = logging.getLogger("draftsmith")

TREE = StaticTree(kind="static", branching=[3, 2, 1])
COSTS = ("parameters", "trained_parameters", "answer_tokens", "labels", "training_seconds", "run_seconds")
NO_COST = dict.fromkeys(COSTS, 0)


def compare_heads(config: BenchHeadsConfig) -> int:
    runs = train_recipes(config)
    target, requests, prompts, _, journal = open_suites(config, runs)
    trained_on = EvalConfig(lookup_answers=runs[0].recipe.data.train)
    answers = known_answers(trained_on, prompts, target.identity) if config.with_lookup else []
    rows: list[dict[str, Any]] = []
    done = journal.read()
    for run in runs:
        baselines: list[FreeDraft] = [] if rows else config.baselines
        sides: dict[str, MeasuredDraft] = {}
        for name, of_suite in requests.items():
            if (key := f"{run.name} {name}") not in done:
                sides = sides or load_sides(config, target, run)
                measured = measure_run(config, target, of_suite, run, sides, baselines, answers, suite=name)
                done[key] = [flat(row) for row in measured]
                journal.append(key, done[key])
            rows += done[key]
    write_results(
        config.output,
        "heads",
        config,
        rows=sorted(rows, key=lambda row: row["family"] in config.baselines),
        ratios={},
        runs=[{"recipe": run.name, "artifact": str(run.artifact), "git": read_git(run)} for run in runs],
        device=str(target.device),
        threads=torch.get_num_threads(),
    )
    journal.path.unlink(missing_ok=True)
    return verdict(rows)


class MeasuredDraft(NamedTuple):
    draft: Draft
    settings: DecodeConfig
    cost: dict[str, Any]
    has_lookup: bool = False  # beside it, in decoding


def load_sides(config: BenchHeadsConfig, target: Target, run: TrainingRun) -> dict[str, MeasuredDraft]:
    """Return a run's draft, and as `trees` and `with_lookup` ask for it."""
    draft = load_draft(run.artifact, target.identity, target.model)
    settings = DecodeConfig(
        num_speculative_tokens=draft.metadata.num_speculative_tokens,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        batch_size=1,
    )
    chain = MeasuredDraft(draft, settings, cost_of(run))
    sides = {run.name: chain}
    asked = EvalConfig(decode=settings)
    longer = {"num_speculative_tokens": asked.suffix_length}
    if config.with_lookup:
        with_lookup = chain._replace(settings=settings.model_copy(update=longer), has_lookup=True)
        sides[f"{run.name} {WITH_LOOKUP}"] = with_lookup
    if run.name in config.trees:
        by_tree = settings.model_copy(update={"tree": TREE})
        sides[f"{run.name}, static tree"] = chain._replace(settings=by_tree)
    return sides


def measure_run(
    config: BenchHeadsConfig,
    target: Target,
    requests: Sequence[Request],
    run: TrainingRun,
    sides: Mapping[str, MeasuredDraft],
    baselines: list[FreeDraft],
    answers: Answers,
    *,
    suite: str,
) -> list[dict[str, Any]]:
    """Decode with a run's drafts, the baselines and plain decoding in turns; a row each.

    Suffix lookup knows the `answers`, those that were trained on, and learns those to the prompts before.
    """
    draft, settings, *_ = sides[run.name]
    evaluation = EvalConfig(decode=settings, repeats=config.repeats, baselines=baselines)
    by_mode = {name: side.settings for name, side in sides.items()}
    drafts = drafts_by_mode(evaluation) | {name: each.num_speculative_tokens for name, each in by_mode.items()}
    # A lookup of its own for each mode and suite, as the baselines have: it learns what it decodes.
    proposers = {
        name: add_lookup(draft.proposer, evaluation, target, answers) if side.has_lookup else draft.proposer
        for name, side in sides.items()
    }
    decoded_by = proposers | make_baselines(evaluation, target, answers)
    records = measure(target, requests, evaluation, decoded_by, settings=by_mode)
    check_finite(records.generations, f"recipe {run.name}")
    readings: Readings = {}

    def row(family: str, recipe: str | None, mode: str, cost: Mapping[str, Any]) -> dict[str, Any]:
        pair = records.of(AUTOREGRESSIVE), records.of(mode)
        judged = judge_lossless(target, *pair, by_mode.get(mode, settings), config.lossless, decoded_by[mode], readings)
        figures = summarise(records, mode, drafts[mode], config.bootstrap_samples)
        names = {"family": family, "recipe": recipe, "data": Path(config.data or run.recipe.data.train).stem, "suite": suite}
        tree = by_mode[mode].tree if mode in by_mode else None
        paths = tree.paths if isinstance(tree, StaticTree) else None
        return {**names, "tree": paths, **figures, **cost, "lossless": judged["verdict"]}

    kind, rows = draft.metadata.kind, []
    for name, side in sides.items():
        family = f"suffix_lookup + {kind}" if side.has_lookup else kind
        rows.append(row(family, name.removesuffix(f" {WITH_LOOKUP}"), name, side.cost))
        found = rows[-1]["tau"].point, rows[-1]["speedup"].point
        log.info("%s on %s: %.3f tokens per target step, %.2f times plain decoding's speed", name, suite, *found)
    return rows + [row(name, None, name, NO_COST) for name in baselines]


def summarise(records: Records, mode: str, num_speculative_tokens: int, samples: int) -> dict[str, Any]:
    acceptance = Acceptance(num_speculative_tokens, records.of(mode)).summarise(samples=samples, seed=SEED)
    rates = (NOT_AVAILABLE if rate is None else f"{rate:.2f}" for rate in acceptance["position_conditional"])
    return {
        "tau": Interval(acceptance["tokens_per_target_step"], *(acceptance["tokens_per_target_step_ci"] or ())),
        "speedup": speedup(records.timings, mode, samples=samples),
        "alpha_by_position": " / ".join(rates),
        "num_speculative_tokens": num_speculative_tokens,
        "prompts": len(records.of(mode)),
    }


def cost_of(run: TrainingRun) -> dict[str, Any]:
    """Return what a draft takes; `training_seconds` are those of steps, `run_seconds` also have decoding and checkpoints."""
    outcome, data = read_outcome(run), run.recipe.data
    rows, max_length = read_conversations(Path(data.train)), read_metadata(run.artifact).training["data"]["max_length"]
    with safe_open(run.artifact / WEIGHTS_FILE, framework="pt") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118 - not a dict
    return {
        "parameters": sum(math.prod(shape) for shape in shapes),
        "trained_parameters": outcome["trained_parameters"],
        "answer_tokens": ConversationDataset(rows, max_length, data.num_conversations).num_labels,
        "labels": outcome["labels"],
        "training_seconds": outcome["training_seconds"],
        "run_seconds": outcome["seconds"],
    }


def verdict(rows: Sequence[Mapping[str, Any]]) -> int:
    code = DONE
    for row in rows:
        if row["lossless"] == NOT_LOSSLESS:
            name = row["recipe"] or row["family"]
            log.error("%s: its answers differ from plain decoding's by more than a numerical tie", name)
            code = GATE_FAILED
    return code

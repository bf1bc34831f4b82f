"""Drafts for tokens that are no text, strictly and relaxed: `python scripts/lab/benchmark.py modalities`, after the demos.

Beside the head that a demo has trained (`modalities.demo`), others and draft LMs are trained on its data, and each is
measured on its suite as `eval/run.py` does it: by the demo's relaxed rule, and without. tau and quality are those of the whole
suite in the config's batches, the speedup that of `num_timed` prompts one at a time. Trainings and reports are kept while all
that they are made of is the same. Rules judge drafts by their distributions, whatever drafted them, so no family is left out.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.errors import ConfigError
from configs.runtime.loading import load_config
from configs.runtime.resumable import files_fingerprint, fingerprint
from configs.schema.evaluation import EvalConfig, LosslessConfig, QualityConfig
from eval.evaluation import evaluate
from eval.lossless.verdict import NOT_LOSSLESS
from eval.report.change import tau_change
from eval.report.schema import Report, load_report
from eval.stats.bootstrap import Interval
from scripts.lab.bench.harness import write_results
from scripts.lab.bench.head_recipes import train_recipes
from scripts.lab.settings import BenchHeadsConfig, BenchModalitiesConfig, ModalityConfig

log = logging.getLogger("draftsmith")


def compare_modalities(config: BenchModalitiesConfig) -> int:
    """Run the benchmark and write its file; return the exit code."""
    if not config.modalities:
        raise ConfigError("modalities: there is none; --config scripts/lab/configs/bench/modalities.yaml has the demos'")
    rows = [row for name, modality in config.modalities.items() for row in measure_modality(config, name, modality)]
    write_results(config.output, "modalities", config, rows=rows, ratios={})
    return GATE_FAILED if any(row["lossless"] == NOT_LOSSLESS for row in rows) else DONE


def measure_modality(config: BenchModalitiesConfig, name: str, modality: ModalityConfig) -> list[dict[str, Any]]:
    """Train what is not trained yet; return the rows of each draft, strict and relaxed.

    Raises:
        ConfigError: `relaxed` names a config without a lossy rule.
    """
    relaxed = load_config(EvalConfig, modality.relaxed)
    if relaxed.decode.lossy is None:
        raise ConfigError(f"modalities.{name}.relaxed: {modality.relaxed} decodes strictly; name one with decode.lossy")
    recipes = BenchHeadsConfig(
        data=None, cache=None, recipes=modality.recipes, draft_models=modality.draft_models, runs=config.runs
    )
    rows = []
    for draft in [relaxed.draft, *(str(run.artifact) for run in train_recipes(recipes))]:
        strict = None
        for rule in (None, relaxed.decode.lossy):
            decode = relaxed.decode.model_copy(update={"lossy": rule})
            whole = relaxed.model_copy(update={"draft": draft, "decode": decode})
            timed = whole.model_copy(
                update={
                    "suite": whole.suite.model_copy(update={"num_prompts": config.num_timed}),
                    "decode": decode.model_copy(update={"batch_size": 1}),
                    "lossless": LosslessConfig(false_alarm_rate=None),
                    "quality": QualityConfig(),
                    "render": None,
                }
            )
            report, speed = (kept_or_new(each, Path(config.runs) / f"{name}-{whole.decode.rule}") for each in (whole, timed))
            strict = strict or report
            rows.append({"modality": name} | row_of(report, speed, strict))
    return rows


def kept_or_new(config: EvalConfig, parent: Path) -> Report:
    """Return the report of an evaluation, made where the folder in `parent` that is named after all it is made of has none."""
    settings = config.model_dump(mode="json")
    table = (settings["decode"]["lossy"] or {}).get("table")
    files = [*config.drafts, config.suite.path, *([] if table is None else [table])]
    folder = parent / fingerprint(settings, files_fingerprint(map(Path, files)))[:12]
    if (folder / "report.json").is_file():
        log.info("kept: %s", folder)
    else:
        evaluate(config.model_copy(update={"output": str(folder)}))
    return load_report(folder / "report.json")


def row_of(report: Report, timed: Report, strict: Report) -> dict[str, Any]:
    """Return the row of a draft and a rule; its tau over that of the same draft's strict report is missing in that itself."""
    acceptance, speed, quality = report.acceptance, timed.speed, report.quality
    change = tau_change(report, strict) if report is not strict else None
    scores = {} if quality is None else quality.scores
    distance = None if quality is None else quality.feature_distance
    return {
        "family": report.draft.kind,
        "rule": "strict" if report.decode.lossy is None else report.decode.lossy["kind"],
        "tau": interval(acceptance.tokens_per_target_step, acceptance.tokens_per_target_step_ci),
        "tau_vs_strict": Interval(None) if change is None else interval(change.ratio, change.ratio_ci),
        "speedup": Interval(None) if speed is None else interval(speed.decode_speedup, speed.decode_speedup_ci),
        **{
            f"{name.rpartition('.')[2]}_less_plain": interval(score.difference, score.difference_ci)
            for name, score in scores.items()
        },
        "frechet_distance": None if distance is None else distance.between,
        "lossless": report.lossless.verdict if report.lossless.checks or report.decode.lossy else "by its rule",
        "prompts": report.prompts.num_prompts,
    }


def interval(point: float | None, bounds: Any) -> Interval:
    """Return a report's number and its interval, where it has one."""
    return Interval(point, *(bounds or ()))

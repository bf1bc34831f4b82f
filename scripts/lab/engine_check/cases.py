"""The serving check: each draft exported, run in its engine, and compared with our decoder on the same prompts.

The interval of tau alone would not tell a wrong export: it says how prompts differ, and both sides have the same. So counts
are compared as well, prompt by prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.errors import InputError
from eval.decoder.decode import check_decodable
from eval.decoder.records import Generation
from eval.lossless.teacher_forcing import check_tokens
from eval.stats.bootstrap import Interval, paired_ratio_interval
from heads.formats.exporting.exporter import SERVE_FILE, engines_of, export, form_of
from heads.formats.exporting.source import TargetFolder, read_source
from heads.frozen.identity import locate
from heads.frozen.loading import Target, load_target
from heads.metadata import read_metadata
from scripts.lab.bench.harness import flat, write_results
from scripts.lab.bench.head_recipes import train_recipes
from scripts.lab.bench.provenance import check_trained_here
from scripts.lab.bench.turns import first_requests, measured_rows
from scripts.lab.engine_check.engines import ENGINES, EngineAnswer, EngineRun, find_engine, run_engine
from scripts.lab.engine_check.ours import Counts, PlainAnswers, count_ours, decode_plainly, tau
from scripts.lab.measuring import SEED
from scripts.lab.settings import CheckedEngine, ServeCase, ServeCheckConfig

log = logging.getLogger("draftsmith")

AGREES, DISAGREES, CHECKED, NO_ENGINE = "agrees", "disagrees", "format-checked only", "no engine takes it"
# A row's columns; those that do not apply are None.
COLUMNS = (
    "family",
    "engine",
    "engine_version",
    "dtype",
    "num_speculative_tokens",
    "prompts",
    "tau_ours",
    "tau_low",
    "tau_high",
    "tau_engine",
    "tau_inside",
    "tau_ratio",
    "same_tokens",
    "near_ties",
    "same_counts",
    "speedup_engine",
    "speedup_engine_low",
    "speedup_engine_high",
    "verdict",
)


@dataclass(frozen=True, kw_only=True)
class Check:
    config: ServeCheckConfig
    scratch: Path
    target: Target
    target_folder: Path
    reference: PlainAnswers
    # By engine; and by artifact, number of drafts, and what `count_ours` was told.
    plain_runs: dict[str, EngineRun] = field(default_factory=dict)
    our_counts: dict[tuple[str, int, bool, bool], list[Counts]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    number: int
    settings: ServeCase
    artifact: Path


def run_checks(config: ServeCheckConfig) -> int:
    if not config.cases:
        raise InputError(
            "cases is empty: say which draft is to be tried in which engine, or give --config scripts/lab/configs/serve/..."
        )
    for each in config.cases:
        if each.engine in ENGINES:
            find_engine(str(each.engine), Path(config.environments))
    cases = find_artifacts(config)
    for case in cases:
        check_case(case)
    with TemporaryDirectory(prefix="serve-check-") as scratch:
        check = open_check(config, Path(scratch))
        rows: list[dict[str, Any]] = []
        for case in cases:
            rows.append(run_case(check, case))
            log.info("%s", describe(rows[-1]))
    write_results(config.output, "serve", config, rows=rows, ratios={}, threads=config.threads)
    return GATE_FAILED if any(row["verdict"] == DISAGREES for row in rows) else DONE


def find_artifacts(config: ServeCheckConfig) -> list[Case]:
    recipes = list(dict.fromkeys(case.recipe for case in config.cases if case.recipe is not None))
    heads = config.heads.model_copy(update={"recipes": recipes})
    check_trained_here([case.artifact for case in config.cases if case.artifact is not None], config.output)
    trained = {run.name: run.artifact for run in train_recipes(heads, output=config.output)} if recipes else {}
    return [
        Case(
            number=number,
            settings=case,
            artifact=trained[Path(case.recipe).stem] if case.recipe is not None else Path(str(case.artifact)),
        )
        for number, case in enumerate(config.cases)
    ]


def check_case(case: Case) -> None:
    """Refuse a case that cannot be run, before any other takes its time."""
    kind, engine = read_metadata(case.artifact).kind, case.settings.engine
    if engine is None and (takers := engines_of(kind)):
        raise InputError(f"cases[{case.number}].engine is null, and {kind} goes to {', '.join(takers)}; name one")
    if engine is not None:
        form_of(form_for(engine), kind)


def form_for(engine: str) -> str:
    return ENGINES[engine].form if engine in ENGINES else engine


def open_check(config: ServeCheckConfig, scratch: Path) -> Check:
    requests = first_requests(measured_rows(Path(config.prompts), config.num_prompts, 0, config.sources))
    torch.set_num_threads(config.threads)
    target = load_target(config.target)
    check_decodable(target, requests)
    folder = locate(config.target)
    if folder.is_file():
        raise InputError(f"target.name: {folder} is a single file, and engines need the target as a folder")
    reference = decode_plainly(target, requests, config.max_new_tokens)
    return Check(config=config, scratch=scratch, target=target, target_folder=folder.resolve(), reference=reference)


def run_case(check: Check, case: Case) -> dict[str, Any]:
    kind, engine = read_metadata(case.artifact).kind, case.settings.engine
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {"family": kind, "engine": engine}
    if engine is None:
        return row | {"verdict": NO_ENGINE}
    out = check.scratch / f"case_{case.number}" / "draft"  # vLLM reads the words of this path
    tokens = write_export(check, case, engine, out)
    row |= {"dtype": check.config.target.dtype, "num_speculative_tokens": tokens}
    if engine in get_args(CheckedEngine):
        return row | {"verdict": CHECKED}
    return row | compare(check, case, kind, tokens, out)


def write_export(check: Check, case: Case, engine: str, out: Path) -> int:
    source = read_source(
        case.artifact,
        TargetFolder(check.target_folder, str(check.target_folder)),
        num_speculative_tokens=case.settings.num_speculative_tokens,
        dtype=check.target.model.dtype,
    )
    out.parent.mkdir(parents=True)
    export(source, form_for(engine), out)
    return source.num_speculative_tokens


def compare(check: Check, case: Case, kind: str, tokens: int, out: Path) -> dict[str, Any]:
    config, reference, engine = check.config, check.reference, str(case.settings.engine)
    if engine not in check.plain_runs:
        check.plain_runs[engine] = _run(check, engine, "plain", {"draft": None, "kind": None, "serve": None})
    draft = {"draft": str(out), "kind": kind, "serve": (out / SERVE_FILE).read_text(encoding="utf-8")}
    run = _run(check, engine, out.parent.name, {**draft, "num_speculative_tokens": tokens})
    key = str(case.artifact), tokens, ENGINES[engine].cuts, kind in ENGINES[engine].whole_head
    if key not in check.our_counts:
        check.our_counts[key] = count_ours(reference, case.artifact, tokens, cut=key[2], whole_head=key[3])
    ours, theirs = check.our_counts[key], [answer.counts for answer in run.answers]
    interval = tau(ours, samples=config.bootstrap_samples)
    tokens_compared, is_same = compare_tokens(check, run)
    return judge(
        {
            "engine_version": run.version,
            "prompts": len(ours),
            "tau_ours": interval.point,
            "tau_low": interval.low,
            "tau_high": interval.high,
            "tau_engine": tau(theirs, samples=1).point,
            **tokens_compared,
            **compare_counts(ours, theirs, is_same),
            **flat({"speedup_engine": speedup(check.plain_runs[engine], run, config.bootstrap_samples)}),
        },
        same_counts_share=case.settings.same_counts_share,
        tau_tolerance=config.tau_tolerance,
    )


def compare_tokens(check: Check, run: EngineRun) -> tuple[dict[str, Any], list[bool]]:
    """Return how an engine's answers compare with plain decoding's, and by prompt whether they are the same."""
    plain = check.reference.plain
    served = [_generation(*pair) for pair in zip(plain, run.answers, strict=True)]
    found = check_tokens(check.target, plain, served, check.config.lossless.tie_noise)
    ties = sum((each.prompt_id, each.turn) not in found.wrong_answers for each in found.divergences)
    for each in found.divergences:
        log.info(
            "%s departs at token %d: gap %.3g, tie %.3g", each.prompt_id, each.position, each.logit_gap, each.tie_tolerance
        )
    is_same = [one.tokens == other.tokens for one, other in zip(plain, served, strict=True)]
    return {"same_tokens": sum(is_same) / len(plain), "near_ties": ties, "wrong": len(found.wrong_answers)}, is_same


def compare_counts(ours: Sequence[Counts], theirs: Sequence[Counts], is_same: Sequence[bool]) -> dict[str, float | None]:
    """Return how both sides' counts compare on the prompts that got the same tokens."""
    pairs = [(own, engines) for own, engines, same in zip(ours, theirs, is_same, strict=True) if same]
    if not pairs:
        return {"same_counts": None, "tau_ratio": None}
    one, other = (tau(side, samples=1).point for side in zip(*pairs, strict=True))
    return {
        "same_counts": sum(own == engines for own, engines in pairs) / len(pairs),
        "tau_ratio": None if one is None or other is None else other / one,
    }


def speedup(plain: EngineRun, run: EngineRun, samples: int) -> Interval:
    """Return the engine's tokens a second with the draft over those without, of two runs one after the other: noisy."""
    columns = [
        [value(answer) for answer in each.answers]
        for each in (run, plain)
        for value in (lambda answer: float(len(answer.tokens)), lambda answer: answer.seconds)
    ]
    return paired_ratio_interval(*columns, samples=samples, seed=SEED)


def judge(row: Mapping[str, Any], *, same_counts_share: float, tau_tolerance: float) -> dict[str, Any]:
    """Add whether the two taus agree, and the verdict; drop what only the verdict needs. What is None never agrees."""
    low, high, engine, ratio, share = (row[name] for name in ("tau_low", "tau_high", "tau_engine", "tau_ratio", "same_counts"))
    inside = None not in (low, high, engine) and low <= engine <= high
    equal = None not in (ratio, share) and abs(ratio - 1) <= tau_tolerance and share >= same_counts_share
    kept = {name: value for name, value in row.items() if name != "wrong"}
    return kept | {"tau_inside": inside, "verdict": AGREES if inside and equal and not row["wrong"] else DISAGREES}


def describe(row: Mapping[str, Any]) -> str:
    values = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
    return ", ".join(value for value in values if not value.endswith(" None"))


def _run(check: Check, engine: str, name: str, draft: Mapping[str, Any]) -> EngineRun:
    config, reference = check.config, check.reference
    prompts: Sequence[dict[str, Any]] = [
        {"tokens": list(request.tokens), "first": list(answer.tokens[:1]), "length": len(answer.tokens)}
        for request, answer in zip(reference.requests, reference.plain, strict=True)
    ]
    job = {"target": str(check.target_folder), "dtype": config.target.dtype, "prompts": prompts, "num_speculative_tokens": None}
    return run_engine(
        engine,
        {**job, **draft},
        check.scratch / f"{name}_in_{engine}",
        environments=Path(config.environments),
        threads=config.threads,
        timeout_seconds=config.timeout_seconds,
    )


def _generation(plain: Generation, answer: EngineAnswer) -> Generation:
    return replace(plain, mode="engine", tokens=answer.tokens[: len(plain.tokens)])

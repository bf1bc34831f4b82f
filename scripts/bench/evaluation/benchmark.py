"""The evaluation benchmark: the cost model's predictions beside measured speeds, and what evaluating costs beyond decoding.

Predictions are those of one ordinary report: an evaluation at the largest number of drafts gives the acceptance by position
for all of them, and its timing sweep, which follows the decoding, gives the costs. Afterwards the same prompts are decoded
plainly and with each number of drafts, taking turns, with nothing of the prediction in it. The parts of that evaluation are
timed too. `scripts.bench.evaluation.statistics` counts many prompts' records, and looks how often intervals hold the truth.
Left out: batches; the prediction for them takes a batch to stay full, as no batch of a suite does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configs.runtime.command import DONE
from configs.schema.benchmarks import BenchEvalConfig
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import EvalConfig, LosslessConfig
from eval.cost.model import CostModel
from eval.cost.predict import prediction_of
from eval.decoder.clock import Laps
from eval.decoder.decode import Request, decode
from eval.decoder.records import AUTOREGRESSIVE, Timing
from eval.evaluation import evaluate
from eval.measure.record_files import RECORDS, read_records
from eval.measure.suite import load_suite
from eval.measure.turns import Turns
from eval.metrics.speed import compare_speed
from eval.report.schema import read_report
from eval.stats.bootstrap import Interval
from heads.artifact import load_draft
from heads.target.loading import load_target
from scripts.bench.evaluation.statistics import interval_coverage, summarise_many
from scripts.bench.harness import Turn, take_turns, with_bounds, write_results

log = logging.getLogger("draftsmith")

Turns_ = dict[str, list[list[Turn[Timing]]]]  # by side, case and repeat


def compare_predictions(config: BenchEvalConfig) -> int:
    """Run the benchmark and write its file; see `scripts/bench_eval.py`."""
    laps = Laps()
    report, costs = evaluate_once(config, laps)
    measured = measure_speeds(config)
    model = prediction_of(report, "the benchmark's report")
    speeds = summarise_speeds(config, report, model, measured)
    whole = sum(laps.seconds.values())
    parts = [{"part": part, "seconds": seconds, "share": seconds / whole} for part, seconds in costs.items()]
    own_cost = costs["comparing and recording"] + costs["losslessness"] + costs["report"]
    write_results(
        Path(config.output),
        "eval",
        config,
        rows=[*speeds, *parts, summarise_many(config.aggregated_prompts)],
        ratios={
            **with_bounds("evaluator_cost_share", Interval(own_cost / (own_cost + costs["decoding"]))),
            **with_bounds(
                "predicted_vs_measured_speedup_max_error", Interval(max(abs(row["relative_error"]) for row in speeds))
            ),
            **with_bounds("interval_coverage", interval_coverage(config.simulations)),
        },
        sweep=report["speed"]["predicted"]["sweep"],
        position_conditional=report["acceptance"]["position_conditional"],
        device=report["hardware"]["device"],
        threads=torch.get_num_threads(),
    )
    log.info("results in %s", config.output)
    return DONE


def evaluate_once(config: BenchEvalConfig, laps: Laps) -> tuple[dict[str, Any], dict[str, float]]:
    """Evaluate at the largest number of drafts, every prompt as often as by default; return the report and its parts' seconds.

    Checks of a fixed length are off (answers in float32) or a part of their own (the timing sweep), so that what remains
    grows with the prompts as decoding does.
    """
    settings = EvalConfig(
        target=config.target,
        draft=config.draft,
        suite=config.suite,
        decode=DecodeConfig(num_speculative_tokens=config.cost.num_speculative_tokens, max_new_tokens=config.max_new_tokens),
        warmup_prompts=0,
        lossless=LosslessConfig(check_float32_prompts=0),
        cost=config.cost,
        bootstrap_samples=config.bootstrap_samples,
        output=config.runs,
    )
    evaluate(settings, laps)
    report = read_report(Path(config.runs) / "report.json")
    seconds = laps.seconds
    timings = [each for each in read_records(Path(config.runs) / RECORDS) if isinstance(each, Timing)]
    decoding = sum(each.decode_seconds + each.prefill_seconds for each in timings)
    return report, {
        "loading": seconds["loading"],
        "decoding": decoding,
        "comparing and recording": seconds["decoding"] - decoding,
        "losslessness": seconds["losslessness"],
        "report": seconds["report"],
        "timing sweep": seconds["timing sweep"],
    }


def measure_speeds(config: BenchEvalConfig) -> Turns_:
    """Decode every prompt plainly and with each number of drafts, one prompt at a time, in turns."""
    target = load_target(config.target)
    draft = load_draft(config.draft, target.identity, target.model)

    def side(drafts: int, request: Request, repeat: int) -> Timing:
        settings = DecodeConfig(num_speculative_tokens=drafts, max_new_tokens=config.max_new_tokens)
        mode = str(drafts) if drafts else AUTOREGRESSIVE
        _, timing = decode(target, [request], settings, draft.proposer if drafts else None, mode=mode, repeat=repeat)
        return timing

    drafts = range(config.cost.num_speculative_tokens + 1)
    sides: dict[str, Callable[[Request, int], Timing]] = {
        (str(each) if each else AUTOREGRESSIVE): partial(side, each) for each in drafts
    }
    requests = Turns(target, load_suite(config.suite).prompts).first
    return take_turns(sides, requests, config.repeats, description="each number of drafts")


def summarise_speeds(
    config: BenchEvalConfig, report: dict[str, Any], model: CostModel, measured: Turns_
) -> list[dict[str, Any]]:
    """Return a row for each number of drafts: what was predicted, what was measured, and the error relative to that."""
    context = report["speed"]["predicted"]["context_tokens"]
    rows = []
    for drafts in range(1, model.longest + 1):
        timings = _timings(measured, AUTOREGRESSIVE) + _timings(measured, str(drafts))
        speed = compare_speed(timings, str(drafts), samples=config.bootstrap_samples, seed=0)
        own = _timings(measured, str(drafts))
        predicted, found = model.speedup(drafts, 1, context), speed["decode_speedup"]
        rows.append(
            {
                "num_speculative_tokens": drafts,
                "predicted_speedup": predicted,
                **with_bounds("measured_speedup", Interval(found, *(speed["decode_speedup_ci"] or (None, None)))),
                "relative_error": predicted / found - 1,
                "predicted_tau": model.tau(drafts),
                "measured_tau": sum(each.num_tokens for each in own) / sum(each.num_rounds for each in own),
            }
        )
    return rows


def _timings(turns: Turns_, mode: str) -> list[Timing]:
    return [turn.result for repeats in turns[mode] for turn in repeats]

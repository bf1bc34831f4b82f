"""The evaluation benchmark: the cost model's predictions beside measured speeds, and what evaluating costs beyond decoding.

Batches are not measured: a prediction takes them to stay full, and no batch of a suite does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.runtime.command import DONE
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import EvalConfig
from eval.cost.model import CostModel
from eval.cost.predict import prediction_in, prediction_of
from eval.decoder.decode import Request, decode
from eval.decoder.records import AUTOREGRESSIVE, Laps, Timing
from eval.evaluation import evaluate
from eval.measure.record_files import RECORDS, read_records
from eval.measure.suite import Turns, load_suite
from eval.report.schema import Report, load_report
from eval.stats.bootstrap import Interval, ratio_interval
from heads.artifact import load_draft
from heads.frozen.loading import load_target
from scripts.lab.bench.harness import write_results
from scripts.lab.bench.provenance import check_trained_here
from scripts.lab.bench.turns import SideTurns, speedup, take_turns
from scripts.lab.settings import BenchEvalConfig

TRUTH, CLUSTERS = 2.0, 64  # of the simulated suites: tokens a round, prompts

TurnsOfSpeeds = dict[str, SideTurns[Timing]]


def compare_predictions(config: BenchEvalConfig) -> int:
    check_trained_here([config.draft], config.output)
    laps = Laps()
    report, costs = evaluate_once(config, laps)
    measured = measure_speeds(config)
    model = prediction_of(report, "the benchmark's report")
    speeds = summarise_speeds(config, report, model, measured)
    whole = sum(laps.seconds.values())
    parts = [{"part": part, "seconds": seconds, "share": seconds / whole} for part, seconds in costs.items()]
    own_cost = costs["comparing and recording"] + costs["losslessness"] + costs["report"]
    write_results(
        config.output,
        "eval",
        config,
        rows=[*speeds, *parts],
        ratios={
            "evaluator_cost_share": Interval(own_cost / (own_cost + costs["decoding"])),
            "predicted_vs_measured_speedup_max_error": Interval(max(abs(row["relative_error"]) for row in speeds)),
            "interval_coverage": interval_coverage(config.simulations),
        },
        device=report.hardware["device"],
        threads=torch.get_num_threads(),
    )
    return DONE


def evaluate_once(config: BenchEvalConfig, laps: Laps) -> tuple[Report, dict[str, float]]:
    """Evaluate at the largest number of drafts; return the report and its parts' seconds, those of fixed length apart."""
    settings = EvalConfig(
        target=config.target,
        draft=config.draft,
        suite=config.suite,
        decode=DecodeConfig(num_speculative_tokens=config.cost.num_speculative_tokens, max_new_tokens=config.max_new_tokens),
        warmup_prompts=0,
        try_with_lookup=False,
        cost=config.cost,
        bootstrap_samples=config.bootstrap_samples,
        output=config.runs,
        overwrite=True,
    )
    evaluate(settings, laps)
    report = load_report(Path(config.runs) / "report.json")
    seconds = laps.seconds
    timings = [each for each in read_records(Path(config.runs) / RECORDS) if isinstance(each, Timing)]
    decoding = sum(each.decode_seconds + each.prefill_seconds for each in timings)
    return report, {
        "loading": seconds["loading"],
        "choosing the lookup's length": seconds["choosing the lookup's length"],
        "decoding": decoding,
        "comparing and recording": seconds["decoding"] - decoding,
        "losslessness": seconds["losslessness"],
        "report": seconds["report"],
        "timing sweep": seconds["timing sweep"],
    }


def measure_speeds(config: BenchEvalConfig) -> TurnsOfSpeeds:
    """Decode every prompt plainly and with each number of drafts, one prompt at a time, in turns."""
    target = load_target(config.target)
    draft = load_draft(config.draft, target.identity, target.model)

    def side(drafts: int, request: Request, repeat: int) -> Timing:
        settings = DecodeConfig(num_speculative_tokens=drafts, max_new_tokens=config.max_new_tokens)
        mode = str(drafts) if drafts else AUTOREGRESSIVE
        _, timing = decode(target, [request], settings, draft.proposer if drafts else None, mode=mode, repeat=repeat)
        return timing

    sides: dict[str, Callable[[Request, int], Timing]] = {AUTOREGRESSIVE: partial(side, 0)}
    sides |= {str(drafts): partial(side, drafts) for drafts in range(1, config.cost.num_speculative_tokens + 1)}
    requests = Turns(target, load_suite(config.suite).prompts).first
    return take_turns(sides, requests, config.repeats, description="each number of drafts")


def summarise_speeds(
    config: BenchEvalConfig, report: Report, model: CostModel, measured: TurnsOfSpeeds
) -> list[dict[str, Any]]:
    context = prediction_in(report, "the benchmark's report").context_tokens
    rows = []
    for drafts in range(1, model.longest + 1):
        plain, own = ([turn.result for repeats in measured[mode] for turn in repeats] for mode in (AUTOREGRESSIVE, str(drafts)))
        found = speedup([*plain, *own], str(drafts), samples=config.bootstrap_samples)
        predicted = model.speedup(drafts, 1, context)
        rows.append(
            {
                "num_speculative_tokens": drafts,
                "predicted_speedup": predicted,
                "measured_speedup": found,
                "relative_error": predicted / (found.point or math.nan) - 1,
                "predicted_tau": float(model.num_tokens / model.rounds(drafts).sum()),
                "measured_tau": sum(each.num_tokens for each in own) / sum(each.num_rounds for each in own),
            }
        )
    return rows


def interval_coverage(simulations: int) -> Interval:
    """Return how often the 95 % interval of a pooled ratio holds the truth, with the interval of that share (Wilson, 1927)."""
    rng = np.random.default_rng(0)
    held = 0
    for simulation in range(simulations):
        rounds = rng.integers(20, 60, CLUSTERS).astype(np.float64)
        yields = rng.normal(TRUTH, 0.4, CLUSTERS)  # prompts differ
        interval = ratio_interval(rounds * yields, rounds, samples=400, seed=simulation)
        held += interval.low is not None and interval.high is not None and interval.low <= TRUTH <= interval.high
    share, z = held / simulations, 1.959964
    middle = (share + z**2 / (2 * simulations)) / (1 + z**2 / simulations)
    spread = z * (share * (1 - share) / simulations + z**2 / (4 * simulations**2)) ** 0.5 / (1 + z**2 / simulations)
    return Interval(share, middle - spread, middle + spread)

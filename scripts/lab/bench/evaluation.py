"""The evaluation benchmark: the cost model's predictions beside measured speeds, and what evaluating costs beyond decoding.

Predictions are those of one ordinary report: an evaluation at the largest number of drafts gives the acceptance by position
for all of them, and its timing sweep gives the costs. Afterwards the same prompts are decoded plainly and with each number of
drafts, in turns. The parts of that evaluation are timed too; so are the statistics of 10,000 made-up prompts, in a fresh
process. Simulated suites say how often an interval contains the true value. Batches are not measured: a prediction takes them
to stay full, and no batch of a suite does.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
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
from eval.decoder.clock import Laps
from eval.decoder.decode import Request, decode
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, DistributionComparison, Generation, Round, Timing
from eval.evaluation import evaluate
from eval.measure.record_files import RECORDS, RecordWriter, join_parts, read_records
from eval.measure.suite import load_suite
from eval.measure.turns import Turns
from eval.metrics.tally import Tally
from eval.report.build import PromptSet, build_report
from eval.report.page import render_html
from eval.report.schema import Report, load_report, write_report
from eval.stats.bootstrap import Interval, ratio_interval
from heads.artifact import load_draft
from heads.frozen.loading import load_target
from scripts.lab.bench.harness import in_fresh_process, measure_growth, write_results
from scripts.lab.settings import BenchEvalConfig
from scripts.trials.turns import SideTurns, speedup, take_turns

DRAFTS = 3
TOKENS = 64  # of each answer
CATEGORIES = 8
TRUTH, CLUSTERS = 2.0, 64  # of the simulated suites: tokens a round, prompts

TurnsOfSpeeds = dict[str, SideTurns[Timing]]


def compare_predictions(config: BenchEvalConfig) -> int:
    """Run the benchmark and write its file."""
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
        rows=[*speeds, *parts, in_fresh_process(count_records, config.aggregated_prompts)],
        ratios={
            "evaluator_cost_share": Interval(own_cost / (own_cost + costs["decoding"])),
            "predicted_vs_measured_speedup_max_error": Interval(max(abs(row["relative_error"]) for row in speeds)),
            "interval_coverage": interval_coverage(config.simulations),
        },
        sweep=[each.model_dump() for each in prediction_in(report, "the benchmark's report").sweep],
        position_conditional=report.acceptance.position_conditional,
        device=report.hardware["device"],
        threads=torch.get_num_threads(),
    )
    return DONE


def evaluate_once(config: BenchEvalConfig, laps: Laps) -> tuple[Report, dict[str, float]]:
    """Evaluate at the largest number of drafts, every prompt as often as by default; return the report and its parts' seconds.

    What has a fixed length, the lookup's choice and the timing sweep, are parts of their own: what remains grows with the
    prompts as decoding does.
    """
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
    """Return a row for each number of drafts: what was predicted, what was measured, and the error relative to that."""
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
                "predicted_tau": model.tau(drafts),
                "measured_tau": sum(each.num_tokens for each in own) / sum(each.num_rounds for each in own),
            }
        )
    return rows


# --- many prompts, and coverage ------------------------------------------------------------------------------------


def count_records(num_prompts: int) -> dict[str, Any]:
    """Return what a report of so many made-up prompts takes: seconds, and mebibytes beyond those of this, a fresh process."""
    _count(8)  # what libraries take at their first use is not the records'
    (writing, counting, num_bytes), growth = measure_growth(lambda: _count(num_prompts))
    return {
        "aggregated_prompts": num_prompts,
        "seconds": counting,
        "writing_seconds": writing,
        "peak_mebibytes": growth / 2**20,
        "records_mebibytes": num_bytes / 2**20,
    }


def interval_coverage(simulations: int) -> Interval:
    """Return how often the 95 % interval of a pooled ratio holds the truth, with the interval of that share (Wilson, 1927)."""
    dice = np.random.default_rng(0)
    held = 0
    for simulation in range(simulations):
        rounds = dice.integers(20, 60, CLUSTERS).astype(np.float64)
        yields = dice.normal(TRUTH, 0.4, CLUSTERS)  # prompts differ
        interval = ratio_interval(rounds * yields, rounds, samples=400, seed=simulation)
        held += interval.low is not None and interval.high is not None and interval.low <= TRUTH <= interval.high
    share, z = held / simulations, 1.959964
    middle = (share + z**2 / (2 * simulations)) / (1 + z**2 / simulations)
    spread = z * (share * (1 - share) / simulations + z**2 / (4 * simulations**2)) ** 0.5 / (1 + z**2 / simulations)
    return Interval(share, middle - spread, middle + spread)


def _count(num_prompts: int) -> tuple[float, float, int]:
    """Return the seconds of writing records, those of counting and reporting, and the bytes of the records."""
    dice, texts = random.Random(0), {}
    writing, counting = 0.0, 0.0
    tally = Tally(DRAFTS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with RecordWriter(folder, 0) as writer:
            for number in range(num_prompts):
                generations, timings = _make_up(number, dice)
                texts[generations[0].prompt_id] = "a prompt"
                started = time.perf_counter()
                writer.write(number, generations, timings)
                written = time.perf_counter()
                tally.add(generations, timings)
                writing += written - started
                counting += time.perf_counter() - written
        started = time.perf_counter()
        records = join_parts(folder, writer.spans)
        report = _report(tally, texts)
        write_report(folder / "report.json", report)
        render_html(report)
        return writing, counting + time.perf_counter() - started, records.stat().st_size


def _report(tally: Tally, texts: dict[str, str]) -> Report:
    return build_report(
        target={"name": "made up", "weights_sha256": "0" * 64},
        draft={"kind": "draft_lm", "path": "made up", "sha256": "0" * 64},
        decode={"num_speculative_tokens": DRAFTS, "temperature": 0.0, "verification": "token", "batch_size": 1, "seed": 0},
        prompts=PromptSet(source="made up", sha256="0" * 64, texts=texts),
        records=tally,
        lossless={"verdict": "lossless", "checked_prompts": len(texts), "divergences": []},
        decode_tokens=lambda ids: " ".join(map(str, ids)),
        hardware={},
        versions={},
    )


def _make_up(number: int, dice: random.Random) -> tuple[list[Generation], list[Timing]]:
    """Return a prompt's generations and timings in three modes."""
    generations, timings = [], []
    for mode, drafts in ((AUTOREGRESSIVE, 0), (SPECULATIVE, DRAFTS), ("prompt_lookup", DRAFTS)):
        rounds = _rounds(drafts, dice, with_distributions=mode == SPECULATIVE)
        tokens = (0, *(token for each in rounds for token in each.committed))
        generations.append(
            Generation(
                prompt_id=f"q{number}",
                category=f"category {number % CATEGORIES}",
                mode=mode,
                prompt_tokens=tuple(range(64)),
                tokens=tokens,
                rounds=rounds,
                stop_reason="length",
            )
        )
        seconds = 0.04 * len(rounds) * dice.uniform(0.9, 1.1)
        timings.append(
            Timing(
                mode=mode,
                repeat=0,
                prompt_ids=(f"q{number}",),
                num_tokens=len(tokens) - 1,
                num_rounds=len(rounds),
                prefill_seconds=0.1,
                decode_seconds=seconds,
                draft_seconds=0.2 * seconds,
                verify_seconds=0.7 * seconds,
                sample_seconds=0.05 * seconds,
                measure_seconds=0.0,
            )
        )
    return generations, timings


def _rounds(drafts: int, dice: random.Random, *, with_distributions: bool) -> tuple[Round, ...]:
    rounds, num_tokens = [], 0
    while num_tokens < TOKENS:
        accepted = next((place for place in range(drafts) if dice.random() > 0.6), drafts)
        judged = min(accepted + 1, drafts)
        numbers = tuple(dice.random() for _ in range(judged))
        distributions = (
            DistributionComparison(numbers, numbers, (True,) * judged, numbers, numbers) if with_distributions else None
        )
        rounds.append(
            Round(
                drafted=tuple(range(drafts)),
                num_accepted=accepted,
                committed=(*range(accepted), 99),
                overlap=numbers if with_distributions else None,
                distributions=distributions,
            )
        )
        num_tokens += accepted + 1
    return tuple(rounds)

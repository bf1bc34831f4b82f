"""What statistics cost and whether they are right: many prompts' records counted into a report, intervals that hold the truth.

The records are made up, a few prompts at a time and outside the clock, as decoding would hand them in: three modes, the
distributions of target and draft compared at every judged draft. They go the way of a run's records: to disk, into the tally,
into the report. In a process of its own, which begins without the memory that earlier work took.
"""

from __future__ import annotations

import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, DistributionComparison, Generation, Round, Timing
from eval.measure.record_files import RecordWriter, join_parts
from eval.metrics.tally import Tally
from eval.report.build import PromptSet, build_report, write_report
from eval.report.html import render_page
from eval.stats.bootstrap import Interval, ratio_interval
from scripts.bench.distill.loss import read_kibibytes

DRAFTS = 3
TOKENS = 64  # of each answer
CATEGORIES = 8
TRUTH, CLUSTERS = 2.0, 64  # of the simulated suites: tokens a round, prompts


def summarise_many(num_prompts: int) -> dict[str, Any]:
    """Return what it takes to make a report of so many prompts: seconds, and mebibytes beyond what the process had."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(count_records, num_prompts).result()


def count_records(num_prompts: int) -> dict[str, Any]:
    """Count the records of made-up prompts into a report and its page; to be called in a fresh process."""
    _count(8)  # what libraries take at their first use is not the records'
    # Not getrusage's ru_maxrss: that begins with the peak of the process this one was started from.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # begin the peak anew
    before = read_kibibytes("/proc/self/status", "VmRSS")
    writing, counting, num_bytes = _count(num_prompts)
    return {
        "aggregated_prompts": num_prompts,
        "seconds": counting,
        "writing_seconds": writing,
        "peak_mebibytes": (read_kibibytes("/proc/self/status", "VmHWM") - before) / 1024,
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
        records = join_parts(folder, writer.pieces)
        report = _report(tally, texts)
        write_report(folder / "report.json", report)
        render_page(report, None)
        return writing, counting + time.perf_counter() - started, records.stat().st_size


def _report(tally: Tally, texts: dict[str, str]) -> dict[str, Any]:
    return build_report(
        target={"name": "made up", "weights_sha256": "0" * 64},
        draft={"kind": "draft_lm", "path": "made up", "sha256": "0" * 64},
        decode={"num_speculative_tokens": DRAFTS, "temperature": 0.0, "verification": "token", "batch_size": 1, "seed": 0},
        prompts=PromptSet(source="made up", sha256="0" * 64, texts=texts),
        generations=tally,
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

"""The decode benchmark: ours beside transformers, and a table of all ways of decoding (`bench.decode.table`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from configs.runtime.command import DONE, GATE_FAILED
from configs.schema.evaluation import LosslessConfig
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Timing
from eval.lossless.teacher_forcing import check_tokens
from eval.lossless.verdict import NOT_LOSSLESS
from eval.stats.bootstrap import Interval, ratio_interval
from heads.frozen.loading import Target
from scripts.advice.measuring import SEED
from scripts.lab.bench.decode.setup import DRAFT_LM, Answers, DecodeSetup, Requests, Side, load_for_transformers, load_setup
from scripts.lab.bench.decode.table import (
    Turns,
    TurnsOfSide,
    decode_side,
    first_generations,
    measure_ways,
    summarise_rules,
    summarise_ways,
    timings_of,
)
from scripts.lab.bench.decode.ways import list_ways
from scripts.lab.bench.harness import write_results
from scripts.lab.bench.peers.transformers_generate import TransformersPeer
from scripts.lab.bench.turns import speed_ratio, take_turns
from scripts.lab.settings import BenchDecodeConfig

log = logging.getLogger("draftsmith")

LARGE_BATCH = 8  # the ratio `batch8_vs_batch1` bears it in its name
ASSISTED, GENERATE = "transformers_assisted", "transformers"
LEAN, LEAN_PLAIN = "lean_speculative", "lean_autoregressive"


def compare_decoding(config: BenchDecodeConfig) -> int:
    setup = load_setup(config)
    greedy = measure_greedy(setup)
    batched = measure_batches(setup)
    ways = list_ways(setup)
    table = measure_ways(setup, ways)
    pairs = {
        "speculative_and_transformers_assisted": (ASSISTED, SPECULATIVE),
        "plain_and_transformers_generate": (GENERATE, AUTOREGRESSIVE),
        "lean_and_transformers_assisted": (ASSISTED, LEAN),
        "lean_plain_and_transformers_generate": (GENERATE, LEAN_PLAIN),
    }
    agreement = {
        name: _agreement(setup.target, greedy[theirs], greedy[ours]) for name, (theirs, ours) in pairs.items() if ours in greedy
    }
    rows = summarise_ways(setup, ways, table)
    write_results(
        config.output,
        "decode",
        config,
        rows=rows,
        ratios=summarise_ratios(setup, greedy, batched) | summarise_rules(setup, table),
        agreement=agreement,
        device=str(setup.target.device),
        threads=torch.get_num_threads(),
    )
    for name, found in agreement.items():
        log.info("%s: %s", name.replace("_", " "), ", ".join(f"{key} {value}" for key, value in found.items()))
    wrong = [row for row in rows if row["lossless"] == NOT_LOSSLESS]
    for row in wrong:
        log.error("%s, %s, %s: the answers differ from plain decoding's", row["rule"], row["shape"], row["proposer"])
    return GATE_FAILED if wrong or any(found["not_ties"] for found in agreement.values()) else DONE


# --- measuring ----------------------------------------------------------------------------------------------------


def measure_greedy(setup: DecodeSetup) -> Turns:
    """Decode greedily, a prompt at a time: ours by either forward, and theirs, taking turns."""
    config, settings = setup.config, setup.settings(temperature=0.0)
    draft_model = load_for_transformers(config.draft, setup.target)
    peer = TransformersPeer(setup.target, draft_model, config.num_speculative_tokens, config.max_new_tokens)
    ours = partial(decode_side, setup.target, settings)

    def theirs(batch: Requests, repeat: int, *, assisted: bool) -> Answers:
        return Answers(generations=[peer.generate(request, assisted=assisted) for request in batch], timings=[])

    sides: dict[str, Side] = {
        AUTOREGRESSIVE: partial(ours, None, AUTOREGRESSIVE),
        GENERATE: partial(theirs, assisted=False),
        SPECULATIVE: partial(ours, setup.proposer, SPECULATIVE),
        ASSISTED: partial(theirs, assisted=True),
    }
    if setup.lean_target is not None:
        lean = partial(decode_side, setup.lean_target, settings)
        # Its plain runs bear the name of plain runs, which a speedup is counted from.
        sides |= {LEAN_PLAIN: partial(lean, None, AUTOREGRESSIVE), LEAN: partial(lean, setup.drafts[DRAFT_LM].proposer, LEAN)}
    cases: list[Requests] = [[request] for request in setup.requests]
    return take_turns(sides, cases, config.repeats, description="greedy, beside transformers")


def measure_batches(setup: DecodeSetup) -> Turns:
    """Decode greedily with the draft, eight prompts together and one by one; only whole batches count."""
    whole = len(setup.requests) - len(setup.requests) % LARGE_BATCH
    cases: list[Requests] = [setup.requests[start : start + LARGE_BATCH] for start in range(0, whole, LARGE_BATCH)]
    together = partial(decode_side, setup.target, setup.settings(temperature=0.0), setup.proposer, SPECULATIVE)

    def alone(batch: Requests, repeat: int) -> Answers:
        parts = [together([request], repeat) for request in batch]
        return Answers(generations=[part.generations[0] for part in parts], timings=[])

    if not cases:
        log.warning("fewer than %d prompts: batches are not measured", LARGE_BATCH)
        return {}
    sides: dict[str, Side] = {"together": together, "alone": alone}
    return take_turns(sides, cases, setup.config.repeats, description="batches of eight", unit="batches")


# --- making sense of it -------------------------------------------------------------------------------------------


def summarise_ratios(setup: DecodeSetup, greedy: Turns, batched: Turns) -> dict[str, Interval]:
    """Return the file's ratios. `batch8_vs_batch1` is left out where no whole batch was decoded."""
    samples = setup.config.bootstrap_samples
    speed = partial(speed_ratio, amount=lambda answers: answers.num_tokens, samples=samples)
    ratios = {
        "speed_vs_transformers_assisted": speed(greedy[SPECULATIVE], greedy[ASSISTED]),
        "plain_speed_vs_transformers_generate": speed(greedy[AUTOREGRESSIVE], greedy[GENERATE]),
        "overhead_share": _overhead_share(greedy[SPECULATIVE], samples),
    }
    if setup.lean_target is not None:
        ratios |= {
            "lean_speed_vs_transformers_assisted": speed(greedy[LEAN], greedy[ASSISTED]),
            "lean_plain_speed_vs_transformers_generate": speed(greedy[LEAN_PLAIN], greedy[GENERATE]),
            "compiled_speed_vs_eager": speed(greedy[LEAN_PLAIN], greedy[AUTOREGRESSIVE]),
            "lean_overhead_share": _overhead_share(greedy[LEAN], samples),
        }
    if batched:
        ratios["batch8_vs_batch1"] = speed(batched["together"], batched["alone"])
    return ratios


def _agreement(target: Target, theirs: TurnsOfSide, ours: TurnsOfSide) -> dict[str, int]:
    """Count prompts whose answers differ, and those that rounding does not explain: in bf16 near ties may fall either way."""
    pair = first_generations(theirs), first_generations(ours)
    found = check_tokens(target, *pair, LosslessConfig().tie_noise)
    return {"prompts": len(pair[0]), "differing": len(found.divergences), "not_ties": len(found.wrong_answers)}


def _overhead_share(turns: TurnsOfSide, samples: int) -> Interval:
    """Return the share of decode time outside the forwards and the draws; prompts are drawn, repeats summed."""

    def sums(seconds: Callable[[Timing], float]) -> list[float]:
        return [sum(seconds(timing) for timing in timings_of([repeats])) for repeats in turns]

    overhead, whole = sums(lambda timing: timing.overhead_seconds), sums(lambda timing: timing.decode_seconds)
    return ratio_interval(overhead, whole, samples=samples, seed=SEED)

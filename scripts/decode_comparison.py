"""The decode benchmark: what is measured, in which turns, and what is made of it (`scripts.decode_setup`: on what).

Greedy, one prompt at a time: ours and transformers' with the same draft, ours and transformers' plainly, ours with prompt
lookup, and ours by lean forwards (`heads.lean_forward`) with the draft and plainly. Speculative in batches of eight against
one by one. At temperature 1, in batches: plainly and by each verification rule. Seconds against transformers are of the whole
call, prompt included; a row's speedup is that of the report: decode seconds against our own plain decoding by the same
forward. `compiled_speed_vs_eager` compares plain decoding by lean forwards, which nothing compiles, with transformers'.
Left out: trees.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configs.benchmarks import BenchDecodeConfig
from configs.command import DONE, GATE_FAILED
from configs.schema import DecodeConfig, LosslessConfig
from distill.target import Target
from eval.acceptance import count_per_prompt
from eval.decode import decode
from eval.intervals import Interval, paired_ratio_interval, ratio_interval
from eval.lossless import find_divergences, is_tie, judge_lossless
from eval.records import AUTOREGRESSIVE, SPECULATIVE, Generation
from eval.speed import compare_speed
from heads.prompt_lookup import PromptLookup
from heads.proposer import Proposer
from scripts.benchmarks import Turn, speed_ratio, take_turns, with_bounds, write_results
from scripts.decode_setup import LARGE_BATCH, Answers, Bench, Requests, Rule, load_for_transformers, open_bench
from scripts.memory_floor import floor_shares
from scripts.transformers_peer import TransformersPeer

log = logging.getLogger("draftsmith")

ASSISTED, GENERATE = "transformers_assisted", "transformers"
LEAN, LEAN_PLAIN = "lean_speculative", "lean_autoregressive"

SAMPLING_RULES: tuple[Rule, ...] = ("token", "block", "match")

Side = Callable[[Requests, int], Answers]
TurnsOfSide = list[list[Turn[Answers]]]  # by case and repeat
Turns = dict[str, TurnsOfSide]


def compare_decoding(config: BenchDecodeConfig) -> int:
    """Run the benchmark and write its file; see `scripts/bench_decode.py`. Returns the exit code."""
    bench = open_bench(config)
    greedy = measure_greedy(bench)
    batched = measure_batches(bench)
    sampled = measure_sampled(bench)
    agreement = {
        "speculative_and_transformers_assisted": _agreement(bench.target, greedy[ASSISTED], greedy[SPECULATIVE]),
        "plain_and_transformers_generate": _agreement(bench.target, greedy[GENERATE], greedy[AUTOREGRESSIVE]),
    }
    if bench.lean_target is not None:
        agreement["lean_and_transformers_assisted"] = _agreement(bench.target, greedy[ASSISTED], greedy[LEAN])
        agreement["lean_plain_and_transformers_generate"] = _agreement(bench.target, greedy[GENERATE], greedy[LEAN_PLAIN])
    write_results(
        Path(config.output),
        "decode",
        config,
        rows=summarise_rows(bench, greedy, sampled),
        ratios=summarise_ratios(bench, greedy, batched, sampled),
        agreement=agreement,
        memory_floor=floor_shares(bench.target.model, _seconds_by_forward(greedy)),
        device=str(bench.target.device),
        threads=torch.get_num_threads(),
    )
    log.info("results in %s", config.output)
    for name, found in agreement.items():
        log.info("%s: %s", name.replace("_", " "), ", ".join(f"{key} {value}" for key, value in found.items()))
    return GATE_FAILED if any(found["not_ties"] for found in agreement.values()) else DONE


# --- measuring ----------------------------------------------------------------------------------------------------


def measure_greedy(bench: Bench) -> Turns:
    """Decode greedily, a prompt at a time: ours by either forward, theirs, and prompt lookup, taking turns."""
    config, settings = bench.config, bench.settings(temperature=0.0)
    draft_model = load_for_transformers(config.draft, bench.target)
    peer = TransformersPeer(bench.target, draft_model, config.num_speculative_tokens, config.max_new_tokens)
    lookup = PromptLookup(bench.target.device)
    ours = partial(_decode, bench.target, settings)

    def theirs(batch: Requests, repeat: int, *, assisted: bool) -> Answers:
        return Answers(generations=[peer.generate(request, assisted=assisted) for request in batch], timings=[])

    sides: dict[str, Side] = {
        AUTOREGRESSIVE: partial(ours, None, AUTOREGRESSIVE),
        GENERATE: partial(theirs, assisted=False),
        SPECULATIVE: partial(ours, bench.proposer, SPECULATIVE),
        ASSISTED: partial(theirs, assisted=True),
        "prompt_lookup": partial(ours, lookup, "prompt_lookup"),
    }
    if bench.lean_target is not None:
        lean = partial(_decode, bench.lean_target, settings)
        # Its plain runs bear the name of plain runs, which a speedup is counted from.
        sides |= {LEAN_PLAIN: partial(lean, None, AUTOREGRESSIVE), LEAN: partial(lean, bench.lean_proposer, LEAN)}
    cases: list[Requests] = [[request] for request in bench.requests]
    return take_turns(sides, cases, config.repeats, description="greedy, beside transformers")


def measure_batches(bench: Bench) -> Turns:
    """Decode greedily with the draft, eight prompts together and one by one; only whole batches count."""
    cases = [batch for batch in bench.batches() if len(batch) == LARGE_BATCH]
    together = partial(_decode, bench.target, bench.settings(temperature=0.0), bench.proposer, SPECULATIVE)

    def alone(batch: Requests, repeat: int) -> Answers:
        parts = [together([request], repeat) for request in batch]
        return Answers(generations=[part.generations[0] for part in parts], timings=[part.timings[0] for part in parts])

    if not cases:
        log.warning("fewer than %d prompts: batches are not measured", LARGE_BATCH)
        return {}
    sides: dict[str, Side] = {"together": together, "alone": alone}
    return take_turns(sides, cases, bench.config.repeats, description="batches of eight", unit="batches")


def measure_sampled(bench: Bench) -> Turns:
    """Sample at temperature 1 in batches, plainly and by each verification rule; each repeat has a seed of its own."""
    sides: dict[str, Side] = {AUTOREGRESSIVE: partial(_decode, bench.target, bench.settings(1.0), None, AUTOREGRESSIVE)}
    for rule in SAMPLING_RULES:
        sides[rule] = partial(_decode, bench.target, bench.settings(1.0, rule), bench.proposer, rule)
    return take_turns(sides, bench.batches(), bench.config.repeats, description="sampling by each rule", unit="batches")


def _decode(
    target: Target, settings: DecodeConfig, proposer: Proposer | None, mode: str, batch: Requests, repeat: int
) -> Answers:
    """Decode a batch; the repeat is also the seed, which greedy decoding does not read."""
    seeded = settings.model_copy(update={"seed": repeat})
    generations, timing = decode(target, batch, seeded, proposer, mode=mode, repeat=repeat)
    return Answers(generations=generations, timings=[timing])


# --- making sense of it -------------------------------------------------------------------------------------------


def summarise_ratios(bench: Bench, greedy: Turns, batched: Turns, sampled: Turns) -> dict[str, float | None]:
    """Return the file's ratios, each with its bounds. `batch8_vs_batch1` is left out where no whole batch was decoded."""
    samples = bench.config.bootstrap_samples
    speed = partial(speed_ratio, amount=lambda answers: answers.num_tokens, samples=samples)
    ratios = {
        "speed_vs_transformers_assisted": speed(greedy[SPECULATIVE], greedy[ASSISTED]),
        "plain_speed_vs_transformers_generate": speed(greedy[AUTOREGRESSIVE], greedy[GENERATE]),
        "overhead_share": _overhead_share(greedy[SPECULATIVE], samples),
        "block_vs_token_verification": _tau_ratio(sampled["block"], sampled["token"], samples),
    }
    if bench.lean_target is not None:
        ratios |= {
            "lean_speed_vs_transformers_assisted": speed(greedy[LEAN], greedy[ASSISTED]),
            "lean_plain_speed_vs_transformers_generate": speed(greedy[LEAN_PLAIN], greedy[GENERATE]),
            "compiled_speed_vs_eager": speed(greedy[LEAN_PLAIN], greedy[AUTOREGRESSIVE]),
            "lean_overhead_share": _overhead_share(greedy[LEAN], samples),
        }
    if batched:
        ratios["batch8_vs_batch1"] = speed(batched["together"], batched["alone"])
    return {key: value for name, interval in ratios.items() for key, value in with_bounds(name, interval).items()}


def summarise_rows(bench: Bench, greedy: Turns, sampled: Turns) -> list[dict[str, Any]]:
    """Return a row for each way of decoding that was measured."""
    kind = "draft_lm"
    lean = [] if bench.lean_target is None else [_row(bench, greedy, LEAN, kind, bench.settings(0.0), 1, plain=LEAN_PLAIN)]
    return [
        _row(bench, greedy, SPECULATIVE, kind, bench.settings(0.0), 1),
        *lean,
        _row(bench, greedy, "prompt_lookup", "prompt_lookup", bench.settings(0.0), 1),
        *(_row(bench, sampled, rule, kind, bench.settings(1.0, rule), LARGE_BATCH) for rule in SAMPLING_RULES),
    ]


def _row(
    bench: Bench,
    turns: Turns,
    mode: str,
    proposer: str,
    settings: DecodeConfig,
    batch_size: int,
    plain: str = AUTOREGRESSIVE,
) -> dict[str, Any]:
    samples = bench.config.bootstrap_samples
    committed, rounds = _counts(turns[mode])
    timings = [timing for name in (plain, mode) for answers in _answers(turns[name]) for timing in answers.timings]
    speed = compare_speed(timings, mode, samples=samples, seed=0)
    speedup = Interval(speed["decode_speedup"], *(speed["decode_speedup_ci"] or (None, None)))
    # Greedy answers are compared with plain ones; a sampling rule is held against exact enumeration.
    checks = LosslessConfig(check_float32_prompts=0, false_alarm_rate=None)
    pair = _first_generations(turns[plain]), _first_generations(turns[mode])
    verdict = judge_lossless(bench.target, *pair, settings, checks, bench.load_draft_for)["verdict"]
    return {
        "rule": "greedy" if settings.temperature == 0 else settings.verification,
        "shape": "chain",
        "proposer": proposer,
        "forward": "transformers" if plain == AUTOREGRESSIVE else "lean",
        "lossless": verdict,
        **with_bounds("tau", ratio_interval(committed, rounds, samples=samples, seed=0)),
        **with_bounds("speedup", speedup),
        "temperature": settings.temperature,
        "batch_size": batch_size,
    }


def _agreement(target: Target, theirs: TurnsOfSide, ours: TurnsOfSide) -> dict[str, int]:
    """Count prompts whose answers differ, and those where the target's logits do not explain it by rounding.

    In bf16 a forward over several rows rounds otherwise than one over a single row, so that near ties may fall either way.
    """
    pair = _first_generations(theirs), _first_generations(ours)
    divergences = find_divergences(target, *pair, LosslessConfig().tie_noise)
    not_ties = sum(not is_tie(divergence) for divergence in divergences)
    return {"prompts": len(pair[0]), "differing": len(divergences), "not_ties": not_ties}


def _seconds_by_forward(greedy: Turns) -> dict[str, float]:
    """Return the decode seconds of a plain token by each forward, prompts and repeats pooled."""
    seconds = {}
    for forward, mode in (("transformers", AUTOREGRESSIVE), ("lean", LEAN_PLAIN)):
        timings = [timing for answers in _answers(greedy.get(mode, [])) for timing in answers.timings]
        if tokens := sum(timing.num_tokens for timing in timings):
            seconds[forward] = sum(timing.decode_seconds for timing in timings) / tokens
    return seconds


def _overhead_share(turns: TurnsOfSide, samples: int) -> Interval:
    """Return the share of decode time outside the forwards and the draws; prompts are drawn, repeats summed."""
    timings = [[timing for turn in repeats for timing in turn.result.timings] for repeats in turns]
    overhead = [sum(timing.overhead_seconds for timing in case) for case in timings]
    whole = [sum(timing.decode_seconds for timing in case) for case in timings]
    return ratio_interval(overhead, whole, samples=samples, seed=0)


def _tau_ratio(ours: TurnsOfSide, other: TurnsOfSide, samples: int) -> Interval:
    """Return the ratio of tokens per target step, paired by prompt."""
    return paired_ratio_interval(*_counts(ours), *_counts(other), samples=samples, seed=0)


def _counts(turns: TurnsOfSide) -> tuple[list[float], list[float]]:
    """Return committed tokens and rounds by prompt, summed over the repeats."""
    sums: dict[str, list[int]] = {}
    for answers in _answers(turns):
        for prompt_id, counts in count_per_prompt(answers.generations).items():
            sums[prompt_id] = [sum(pair) for pair in zip(sums.get(prompt_id, (0, 0)), counts, strict=True)]
    return [float(committed) for committed, _ in sums.values()], [float(rounds) for _, rounds in sums.values()]


def _first_generations(turns: TurnsOfSide) -> list[Generation]:
    """Return the first repeat's generations, in the order of the prompts."""
    return [generation for repeats in turns for generation in repeats[0].result.generations]


def _answers(turns: TurnsOfSide) -> Iterable[Answers]:
    return (turn.result for repeats in turns for turn in repeats)

"""The decode benchmark: ours beside transformers, and a table of all ways of decoding."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from configs.runtime.command import DONE, GATE_FAILED
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from eval.decoder.decode import decode
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Generation, Timing
from eval.lossless.teacher_forcing import check_tokens
from eval.lossless.verdict import NOT_LOSSLESS, judge_lossless
from eval.metrics.quality import nats_of
from eval.stats.bootstrap import Interval, paired_ratio_interval, ratio_interval
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposer
from scripts.lab.bench.decode.setup import DRAFT_LM, Answers, DecodeSetup, Requests, Side, load_for_transformers, load_setup
from scripts.lab.bench.decode.ways import COMPARED, Way, list_ways
from scripts.lab.bench.harness import write_results
from scripts.lab.bench.peers.transformers_generate import TransformersPeer
from scripts.lab.bench.turns import SideTurns, count_per_prompt, speed_ratio, speedup, take_turns
from scripts.lab.measuring import SEED
from scripts.lab.settings import BenchDecodeConfig

log = logging.getLogger("draftsmith")

LARGE_BATCH = 8  # the ratio `batch8_vs_batch1` bears it in its name
ASSISTED, GENERATE = "transformers_assisted", "transformers"
LEAN, LEAN_PLAIN = "lean_speculative", "lean_autoregressive"
TurnsOfSide = SideTurns[Answers]
Turns = dict[str, TurnsOfSide]

# Plain decoding, by temperature and by whether the forward is the fastest.
PLAIN = {
    (0.0, True): f"{AUTOREGRESSIVE}, greedy",
    (1.0, True): f"{AUTOREGRESSIVE}, sampled",
    (0.0, False): f"{AUTOREGRESSIVE}, greedy, transformers",
}


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


# --- every way of decoding -------------------------------------------------------------------------------------------


def measure_ways(setup: DecodeSetup, ways: Sequence[Way]) -> Turns:
    """Decode every prompt in every way and plainly, in turns; each repeat of a sampled one has a seed of its own."""
    sides = {
        name: partial(decode_side, _target(setup, fastest), setup.settings(heat), None, AUTOREGRESSIVE)
        for (heat, fastest), name in PLAIN.items()
    }
    for way in ways:
        sides[way.name] = partial(decode_side, _target(setup, way.fastest), way.settings, way.draft, way.name)
    cases: list[Requests] = [[request] for request in setup.requests]
    return take_turns(sides, cases, setup.config.repeats, description=f"{len(ways)} ways of decoding")


def summarise_ways(setup: DecodeSetup, ways: Sequence[Way], turns: Turns) -> list[dict[str, Any]]:
    nats = {name: _nats_a_token(setup, own) for name, own in turns.items()}
    rows = []
    for way in ways:
        plain = PLAIN[way.settings.temperature, way.fastest]
        perplexity = math.exp(nats[way.name] - nats[plain])  # 1: the answers are as likely to the target as its own
        rows.append({**_row(setup, way, turns[plain], turns[way.name]), "perplexity_vs_plain": perplexity})
    return rows


def first_generations(turns: TurnsOfSide) -> list[Generation]:
    return [generation for repeats in turns for generation in repeats[0].result.generations]


def timings_of(turns: TurnsOfSide) -> list[Timing]:
    return [timing for repeats in turns for turn in repeats for timing in turn.result.timings]


def decode_side(
    target: Target, settings: DecodeConfig, proposer: Proposer | None, mode: str, batch: Requests, repeat: int
) -> Answers:
    """Decode a batch; the repeat is also the seed, which greedy decoding does not read."""
    seeded = settings.model_copy(update={"seed": repeat})
    generations, timing = decode(target, batch, seeded, proposer, mode=mode, repeat=repeat)
    return Answers(generations=generations, timings=[timing])


def _target(setup: DecodeSetup, fastest: bool) -> Target:
    return setup.fastest_target if fastest else setup.target


def _row(setup: DecodeSetup, way: Way, plain: TurnsOfSide, own: TurnsOfSide) -> dict[str, Any]:
    samples = setup.config.bootstrap_samples
    # Greedy answers are checked token by token; sampling rules are enumerated in the tests, and their samples not tested here.
    checks = LosslessConfig(first_token_samples=0)
    pair = first_generations(plain), first_generations(own)
    judged = judge_lossless(_target(setup, way.fastest), *pair, way.settings, checks, None)
    drafted = [round_.num_drafted for generation in pair[1] for round_ in generation.rounds]
    return {
        "rule": way.rule,
        "shape": way.shape,
        "proposer": way.proposer,
        "forward": "lean" if way.fastest and setup.lean_target is not None else "transformers",
        "temperature": way.settings.temperature,
        "drafts_a_round": sum(drafted) / len(drafted) if drafted else None,  # particles have no rounds
        "lossless": judged["verdict"] if judged["checks"] or way.settings.lossy else "by its rule",
        "tau": ratio_interval(*_counts(own), samples=samples, seed=SEED),
        "speedup": speedup([*timings_of(plain), *timings_of(own)], way.name, samples=samples),
    }


def _nats_a_token(setup: DecodeSetup, turns: TurnsOfSide) -> float:
    answers = first_generations(turns)
    return sum(nats_of(setup.target, answer) for answer in answers) / sum(len(answer.tokens) for answer in answers)


def _counts(turns: TurnsOfSide) -> tuple[list[float], list[float]]:
    sums: dict[str, list[int]] = {}
    for turn in chain.from_iterable(turns):
        for prompt_id, counts in count_per_prompt(turn.result.generations).items():
            sums[prompt_id] = [sum(pair) for pair in zip(sums.get(prompt_id, (0, 0)), counts, strict=True)]
    return [float(committed) for committed, _ in sums.values()], [float(rounds) for _, rounds in sums.values()]


def summarise_rules(setup: DecodeSetup, turns: Turns) -> dict[str, Interval]:
    """Return the ratios of tokens per target step, paired by prompt, between ways that were measured."""
    samples = setup.config.bootstrap_samples
    return {
        name: paired_ratio_interval(*_counts(turns[one]), *_counts(turns[other]), samples=samples, seed=SEED)
        for name, (one, other) in COMPARED.items()
        if one in turns and other in turns
    }

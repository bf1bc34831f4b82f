"""The decode benchmark's table: every way of decoding on the same prompts, in turns with plain decoding, a row for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from eval.decoder.decode import decode
from eval.decoder.records import AUTOREGRESSIVE, Generation, Timing
from eval.lossless.verdict import judge_lossless
from eval.metrics.quality import nats_of
from eval.stats.bootstrap import Interval, paired_ratio_interval, ratio_interval
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposer
from scripts.advice.measuring import SEED
from scripts.lab.bench.decode.setup import Answers, DecodeSetup, Requests
from scripts.lab.bench.decode.ways import COMPARED, Way
from scripts.lab.bench.turns import SideTurns, count_per_prompt, speedup, take_turns

TurnsOfSide = SideTurns[Answers]
Turns = dict[str, TurnsOfSide]

# Plain decoding, by temperature and by whether the forward is the fastest.
PLAIN = {
    (0.0, True): f"{AUTOREGRESSIVE}, greedy",
    (1.0, True): f"{AUTOREGRESSIVE}, sampled",
    (0.0, False): f"{AUTOREGRESSIVE}, greedy, transformers",
}


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
    checks = LosslessConfig(false_alarm_rate=None)
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

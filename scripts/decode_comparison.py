"""The decode benchmark: what is measured, in which turns, and what is made of it.

Greedy, one prompt at a time: ours and transformers' with the same draft, ours and transformers' plainly, ours with prompt
lookup. Speculative in batches of eight against one by one. At temperature 1, in batches: plainly and by each verification
rule. Seconds against transformers are of the whole call, prompt included; a row's speedup is that of the report: decode
seconds against our own plain decoding. Left out: trees and compiled forwards, which the decoder does not have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.benchmarks import BenchDecodeConfig
from configs.command import DONE, GATE_FAILED
from configs.schema import DecodeConfig, LosslessConfig
from distill.target import Target, load_target, move
from eval.acceptance import count_per_prompt
from eval.decode import Request, check_decodable, decode
from eval.intervals import Interval, paired_ratio_interval, ratio_interval
from eval.lossless import find_divergences, is_tie, judge_lossless
from eval.records import AUTOREGRESSIVE, SPECULATIVE, Generation, Timing
from eval.speed import compare_speed
from eval.suite import load_suite
from heads.artifact import Draft, load_draft
from heads.prompt_lookup import PromptLookup
from heads.proposer import Proposer
from scripts.benchmarks import Turn, speed_ratio, take_turns, with_bounds, write_results
from scripts.transformers_peer import TransformersPeer

log = logging.getLogger("draftsmith")

LARGE_BATCH = 8  # the ratio `batch8_vs_batch1` bears it in its name
ASSISTED, GENERATE = "transformers_assisted", "transformers"

Rule = Literal["token", "block", "match"]
SAMPLING_RULES: tuple[Rule, ...] = ("token", "block", "match")


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a side made of some prompts; transformers keeps no timings by phase."""

    generations: list[Generation]
    timings: list[Timing]

    @property
    def num_tokens(self) -> int:
        """New token ids, the first of each answer included."""
        return sum(len(generation.tokens) for generation in self.generations)


Requests = Sequence[Request]
Side = Callable[[Requests, int], Answers]
TurnsOfSide = list[list[Turn[Answers]]]  # by case and repeat
Turns = dict[str, TurnsOfSide]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A target, a draft and what they are measured on."""

    config: BenchDecodeConfig
    target: Target
    proposer: Proposer
    requests: list[Request]

    def settings(self, temperature: float, verification: Rule = "token") -> DecodeConfig:
        """Return how to decode."""
        return DecodeConfig(
            num_speculative_tokens=self.config.num_speculative_tokens,
            max_new_tokens=self.config.max_new_tokens,
            temperature=temperature,
            verification=verification,
        )

    def batches(self) -> list[Requests]:
        """Return the requests in large batches, the last of which may be smaller."""
        return [self.requests[start : start + LARGE_BATCH] for start in range(0, len(self.requests), LARGE_BATCH)]

    def load_draft_for(self, target: Target) -> Draft:
        """Load the draft once more, for a target in another dtype."""
        return load_draft(self.config.draft, target.identity, target.model)


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
    write_results(
        Path(config.output),
        "decode",
        config,
        rows=summarise_rows(bench, greedy, sampled),
        ratios=summarise_ratios(bench, greedy, batched, sampled),
        agreement=agreement,
        device=str(bench.target.device),
        threads=torch.get_num_threads(),
    )
    log.info("results in %s", config.output)
    for name, found in agreement.items():
        log.info("%s: %s", name.replace("_", " "), ", ".join(f"{key} {value}" for key, value in found.items()))
    return GATE_FAILED if any(found["not_ties"] for found in agreement.values()) else DONE


def open_bench(config: BenchDecodeConfig) -> Bench:
    """Load what is measured.

    Raises:
        InputError: the draft is not for this target, or a prompt cannot be decoded.
    """
    suite = load_suite(config.suite)
    target = load_target(config.target)
    draft = load_draft(config.draft, target.identity, target.model)
    requests = [
        Request(
            prompt_id=prompt.prompt_id,
            category=prompt.category,
            tokens=tuple(target.encode_chat([{"role": "user", "content": prompt.turns[0]}])),
        )
        for prompt in suite.prompts
    ]
    check_decodable(target, requests)
    return Bench(config=config, target=target, proposer=draft.proposer, requests=requests)


def load_for_transformers(draft: str, target: Target) -> PreTrainedModel:
    """Load a draft LM's artifact once more, as a user of transformers does: ours may keep a part of its head only."""
    attention = target.model.config._attn_implementation
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=target.model.dtype, attn_implementation=attention)
    return move(model, target.device, target.model.dtype).eval()


# --- measuring ----------------------------------------------------------------------------------------------------


def measure_greedy(bench: Bench) -> Turns:
    """Decode greedily, a prompt at a time: both of ours, both of theirs, and prompt lookup, taking turns."""
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
    if batched:
        ratios["batch8_vs_batch1"] = speed(batched["together"], batched["alone"])
    return {key: value for name, interval in ratios.items() for key, value in with_bounds(name, interval).items()}


def summarise_rows(bench: Bench, greedy: Turns, sampled: Turns) -> list[dict[str, Any]]:
    """Return a row for each way of decoding that was measured."""
    kind = "draft_lm"
    return [
        _row(bench, greedy, SPECULATIVE, kind, bench.settings(0.0), 1),
        _row(bench, greedy, "prompt_lookup", "prompt_lookup", bench.settings(0.0), 1),
        *(_row(bench, sampled, rule, kind, bench.settings(1.0, rule), LARGE_BATCH) for rule in SAMPLING_RULES),
    ]


def _row(bench: Bench, turns: Turns, mode: str, proposer: str, settings: DecodeConfig, batch_size: int) -> dict[str, Any]:
    samples = bench.config.bootstrap_samples
    committed, rounds = _counts(turns[mode])
    timings = [timing for name in (AUTOREGRESSIVE, mode) for answers in _answers(turns[name]) for timing in answers.timings]
    speed = compare_speed(timings, mode, samples=samples, seed=0)
    speedup = Interval(speed["decode_speedup"], *(speed["decode_speedup_ci"] or (None, None)))
    # Greedy answers are compared with plain ones; a sampling rule is held against exact enumeration.
    checks = LosslessConfig(check_float32_prompts=0)
    pair = _first_generations(turns[AUTOREGRESSIVE]), _first_generations(turns[mode])
    verdict = judge_lossless(bench.target, *pair, settings, checks, bench.load_draft_for)["verdict"]
    return {
        "rule": "greedy" if settings.temperature == 0 else settings.verification,
        "shape": "chain",
        "proposer": proposer,
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

"""How fast one way of decoding is against another, in the same run and on the same batches: the report's speed section.

The cluster is the batch of prompts decoded together; its repeats and turns are summed first, because they share the prompts'
difficulty and are no independent evidence. Both sides count the same kind of token ids, and the prefill's token belongs to
neither decode time nor decode tokens. `summarise_advantage` pairs the draft with a baseline, for gates with `must_beat`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Timing
from eval.stats.bootstrap import Floats, Interval, median_interval, paired_ratio_interval

PHASES = ("draft_seconds", "verify_seconds", "sample_seconds", "overhead_seconds")
Sums = Mapping[Any, Sequence[float]]  # two sums by cluster


@dataclass(frozen=True, kw_only=True)
class BatchCosts:
    """Seconds and tokens of one mode, each [batches], summed over repeats."""

    decode_seconds: Floats
    prefill_seconds: Floats
    num_tokens: Floats
    num_prompts: Floats


def summarise_speed(timings: Sequence[Timing], *, samples: int, seed: int, keep_batches: bool = False) -> dict[str, Any] | None:
    """Return speculative decoding's speed against plain decoding, or `None` where one of the two was not timed.

    Args:
        timings: of all modes and repeats.
        samples, seed: of the bootstrap over batches.
        keep_batches: also return `per_batch`, with which another report is compared batch by batch (`eval.stats.paired`).

    Raises:
        ValueError: the two were timed on different batches or different numbers of repeats.
    """
    plain, speculative = ([timing for timing in timings if timing.mode == mode] for mode in (AUTOREGRESSIVE, SPECULATIVE))
    if not plain or not speculative:
        return None
    result: dict[str, Any] = {}
    for mode, own in ((AUTOREGRESSIVE, plain), (SPECULATIVE, speculative)):
        result[f"decode_seconds_{mode}"] = sum(timing.decode_seconds for timing in own)
        result[f"prefill_seconds_{mode}"] = sum(timing.prefill_seconds for timing in own)
        result[f"decode_tokens_{mode}"] = sum(timing.num_tokens for timing in own)
    return {
        **result,
        **compare_speed(timings, SPECULATIVE, samples=samples, seed=seed),
        "repeats": len({timing.repeat for timing in speculative}),
        "num_batches": len(set(home_batches(speculative).values())),
        "interleaving": list(dict.fromkeys(timing.mode for timing in timings)),
        "measure_seconds": sum(timing.measure_seconds for timing in speculative),
        "phases": _phases(speculative),
        "phases_autoregressive": _phases(plain),
        **({"per_batch": _per_batch(timings)} if keep_batches else {}),
    }


def compare_speed(timings: Sequence[Timing], mode: str, *, samples: int, seed: int) -> dict[str, Any]:
    """Return how much faster `mode` was than plain decoding: totals with prefill and without, and the median batch.

    Raises:
        ValueError: the two were timed on different batches or different numbers of repeats.
    """
    plain, other = _costs_side_by_side(timings, AUTOREGRESSIVE, mode)
    decode = _speedup(plain.decode_seconds, plain.num_tokens, other.decode_seconds, other.num_tokens, samples, seed)
    end_to_end = _speedup(
        plain.decode_seconds + plain.prefill_seconds,
        plain.num_tokens + plain.num_prompts,
        other.decode_seconds + other.prefill_seconds,
        other.num_tokens + other.num_prompts,
        samples,
        seed,
    )
    timed = (plain.num_tokens > 0) & (other.num_tokens > 0) & (plain.decode_seconds > 0) & (other.decode_seconds > 0)
    ratios = (plain.decode_seconds[timed] / plain.num_tokens[timed]) / (other.decode_seconds[timed] / other.num_tokens[timed])
    median = median_interval(ratios, samples=samples, seed=seed)
    return {
        "decode_speedup": decode.point,
        "decode_speedup_ci": decode.bounds,
        "decode_speedup_median": median.point,
        "decode_speedup_median_ci": median.bounds,
        "end_to_end_speedup": end_to_end.point,
        "end_to_end_speedup_ci": end_to_end.bounds,
    }


def summarise_advantage(
    ours: Mapping[str, Sequence[int]],
    theirs: Mapping[str, Sequence[int]],
    timings: Iterable[Timing],
    mode: str,
    *,
    samples: int,
    seed: int,
) -> dict[str, Any]:
    """Return this draft's tokens per target step, and its decode speed, divided by those of `mode`, with intervals.

    Args:
        ours, theirs: `{prompt id: [committed tokens, rounds]}` with this draft and in `mode`. Prompts that only one of them
            has are left out, as the report's list of failed requests and its count of prompts show.
        timings: of the run, all modes; a batch counts where both modes were timed on it.
        mode: the other way of decoding.
        samples, seed: of the bootstrap.
    """
    timings = list(timings)
    tau = _ratio(ours, theirs, samples, seed)
    speed = _ratio(_speeds(timings, SPECULATIVE), _speeds(timings, mode), samples, seed)
    return {
        "tokens_per_target_step_ratio": tau.point,
        "tokens_per_target_step_ratio_ci": tau.bounds,
        "decode_speed_ratio": speed.point,
        "decode_speed_ratio_ci": speed.bounds,
    }


def timings_within(timings: Iterable[Timing], prompt_ids: set[str]) -> list[Timing]:
    """Return the timings of batches that hold only prompts of `prompt_ids`, or none where a batch holds others as well.

    A batch of mixed categories has one time, which cannot be shared out among them.
    """
    touching = [timing for timing in timings if prompt_ids.intersection(timing.prompt_ids)]
    return touching if all(prompt_ids.issuperset(timing.prompt_ids) for timing in touching) else []


def home_batches(timings: Iterable[Timing]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return for each batch, by its prompts, the one its prompts were first decoded in.

    A later turn goes on with those prompts of a batch that have one: a smaller batch of the same conversations, and no
    independent evidence.
    """
    first_with: dict[str, tuple[str, ...]] = {}
    home: dict[tuple[str, ...], tuple[str, ...]] = {}
    for batch in dict.fromkeys(timing.prompt_ids for timing in timings):
        home[batch] = first_with.get(batch[0], batch)
        for prompt_id in batch:
            first_with.setdefault(prompt_id, home[batch])
    return home


def _speedup(plain_seconds: Floats, plain_tokens: Floats, seconds: Floats, tokens: Floats, samples: int, seed: int) -> Interval:
    """Return (plain seconds / plain tokens) / (seconds / tokens), of sums, with both sides drawn from the same batches."""
    return paired_ratio_interval(plain_seconds, plain_tokens, seconds, tokens, samples=samples, seed=seed)


def _costs_side_by_side(timings: Sequence[Timing], mode: str, other: str) -> tuple[BatchCosts, BatchCosts]:
    """Return both modes' costs with batches in the same order."""
    runs = [sorted((timing.prompt_ids, timing.repeat) for timing in timings if timing.mode == name) for name in (mode, other)]
    if runs[0] != runs[1]:
        raise ValueError(f"{mode} and {other} were timed on different batches or repeats; a speedup needs the same for both")
    home = home_batches([timing for timing in timings if timing.mode == mode])
    row_of_home = {batch: row for row, batch in enumerate(dict.fromkeys(home.values()))}
    row_of = {batch: row_of_home[home[batch]] for batch in home}
    return _costs(timings, mode, row_of), _costs(timings, other, row_of)


def _costs(timings: Iterable[Timing], mode: str, row_of: Mapping[tuple[str, ...], int]) -> BatchCosts:
    """Sum one mode's repeats and turns, batch by batch; `row_of` says which rows belong together."""
    sums_BF = np.zeros((len(set(row_of.values())), 4))
    for timing in timings:
        if timing.mode == mode:
            counts = (timing.decode_seconds, timing.prefill_seconds, timing.num_tokens, len(timing.prompt_ids))
            sums_BF[row_of[timing.prompt_ids]] += counts
    decode_seconds, prefill_seconds, num_tokens, num_prompts = sums_BF.T
    return BatchCosts(
        decode_seconds=decode_seconds, prefill_seconds=prefill_seconds, num_tokens=num_tokens, num_prompts=num_prompts
    )


def _per_batch(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """Return the prompts of each batch, and [decode seconds, decode tokens] of both modes, summed over repeats."""
    sums: dict[tuple[str, ...], dict[str, list[float]]] = {}
    home = home_batches(timings)
    for timing in timings:
        if timing.mode in (AUTOREGRESSIVE, SPECULATIVE):
            batch = sums.setdefault(home[timing.prompt_ids], {AUTOREGRESSIVE: [0.0, 0.0], SPECULATIVE: [0.0, 0.0]})
            batch[timing.mode][0] += timing.decode_seconds
            batch[timing.mode][1] += timing.num_tokens
    return [{"prompt_ids": list(prompt_ids), **batch} for prompt_ids, batch in sums.items()]


def _phases(timings: Sequence[Timing]) -> dict[str, Any]:
    """Return the seconds of each phase, and `shares` of their sum, keyed `draft`, `verify`, `sample`, `overhead`."""
    seconds = {phase: sum(getattr(timing, phase) for timing in timings) for phase in PHASES}
    total = sum(seconds.values())
    shares = {phase.removesuffix("_seconds"): value / total if total else None for phase, value in seconds.items()}
    return {**seconds, "shares": shares}


def _ratio(ours: Sums, theirs: Sums, samples: int, seed: int) -> Interval:
    """Return (sum a / sum b) / (sum c / sum d) over the clusters that both have."""
    common = [cluster for cluster in ours if cluster in theirs]
    columns = [[sums[cluster][column] for cluster in common] for sums in (ours, theirs) for column in (0, 1)]
    return paired_ratio_interval(*columns, samples=samples, seed=seed)


def _speeds(timings: Iterable[Timing], mode: str) -> Sums:
    """Return decoded tokens and seconds by batch; its repeats and turns are no evidence of their own and are added up."""
    sums: dict[tuple[str, ...], list[float]] = {}
    own_timings = [timing for timing in timings if timing.mode == mode]
    home = home_batches(own_timings)
    for timing in own_timings:
        own = sums.setdefault(home[timing.prompt_ids], [0.0, 0.0])
        own[0] += timing.num_tokens
        own[1] += timing.decode_seconds
    return sums

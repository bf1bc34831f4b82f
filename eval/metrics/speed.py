"""How fast one way of decoding is against another, in the same run and on the same batches: the report's speed section.

The cluster is the batch of prompts decoded together; its repeats and turns are summed first, because they share the prompts'
difficulty and are no independent evidence. Both sides count the same kind of token ids, and the prefill's token belongs to
neither decode time nor decode tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Timing
from eval.stats.bootstrap import Interval, paired_ratio_interval

PHASES = ("draft_seconds", "verify_seconds", "sample_seconds", "overhead_seconds")
Sums = Mapping[Any, Sequence[float]]  # two sums by cluster


def summarise_speed(timings: Sequence[Timing], *, samples: int, seed: int) -> dict[str, Any] | None:
    """Return speculative decoding's speed against plain decoding, or `None` where one of the two was not timed.

    By `per_batch`, [decode seconds, decode tokens] of both modes, another report is compared batch by batch
    (`eval.report.comparison`).
    """
    by_mode = {mode: [timing for timing in timings if timing.mode == mode] for mode in (AUTOREGRESSIVE, SPECULATIVE)}
    if not all(by_mode.values()):
        return None
    result = compare_speed(timings, SPECULATIVE, samples=samples, seed=seed)
    for mode, own in by_mode.items():
        seconds, num_tokens = (sum(getattr(timing, field) for timing in own) for field in ("decode_seconds", "num_tokens"))
        result[f"decode_seconds_{mode}"] = seconds
        result[f"prefill_seconds_{mode}"] = sum(timing.prefill_seconds for timing in own)
        result[f"decode_tokens_{mode}"] = num_tokens
        result[f"milliseconds_per_token_{mode}"] = 1000 * seconds / num_tokens if num_tokens else None
        result["phases_autoregressive" if mode == AUTOREGRESSIVE else "phases"] = {
            phase: sum(getattr(timing, phase) for timing in own) for phase in PHASES
        }
    plain, speculative = (sums_by_batch(timings, mode, "decode_seconds", "num_tokens") for mode in by_mode)
    whole = sum(result["phases"].values()) or 1.0
    result["phase_shares"] = {phase: seconds / whole for phase, seconds in result["phases"].items()}
    result["per_batch"] = [
        {"prompt_ids": list(batch), AUTOREGRESSIVE: own, SPECULATIVE: speculative[batch]}
        for batch, own in plain.items()
        if batch in speculative
    ]
    return result | {"repeats": len({timing.repeat for timing in by_mode[SPECULATIVE]}), "num_batches": len(speculative)}


def compare_speed(timings: Sequence[Timing], mode: str, *, samples: int, seed: int) -> dict[str, Any]:
    """Return how much faster `mode` was than plain decoding: totals with prefill and without."""
    modes = (AUTOREGRESSIVE, mode)
    runs = [sorted((each.prompt_ids, each.repeat) for each in timings if each.mode == name) for name in modes]
    if runs[0] != runs[1]:
        raise ValueError(
            f"{AUTOREGRESSIVE} and {mode} were timed on different batches or repeats; a speedup needs the same for both"
        )
    fields = ("decode_seconds", "prefill_seconds", "num_tokens", "num_prompts")
    sums = [sums_by_batch(timings, name, *fields) for name in modes]
    plain, other = (np.array([own[batch] for batch in sums[0]], np.float64).reshape(-1, len(fields)).T for own in sums)
    whole = plain[0] + plain[1], plain[2] + plain[3], other[0] + other[1], other[2] + other[3]
    found = {
        "decode_speedup": paired_ratio_interval(plain[0], plain[2], other[0], other[2], samples=samples, seed=seed),
        "end_to_end_speedup": paired_ratio_interval(*whole, samples=samples, seed=seed),
    }
    return {name: each.point for name, each in found.items()} | {f"{name}_ci": each.bounds for name, each in found.items()}


def summarise_advantage(
    ours: Sums, theirs: Sums, timings: Sequence[Timing], mode: str, *, samples: int, seed: int, ours_mode: str = SPECULATIVE
) -> dict[str, Any]:
    """Return this draft's tokens per target step, and its decode speed, divided by those of `mode`, with intervals.

    `ours` and `theirs` are `{prompt id: [committed tokens, rounds]}`. Prompts that only one of them has are left out, as are
    batches on which only one mode was timed.
    """
    tau = sums_ratio(ours, theirs, samples, seed)
    own, other = (sums_by_batch(timings, each, "num_tokens", "decode_seconds") for each in (ours_mode, mode))
    speed = sums_ratio(own, other, samples, seed)
    return {
        "tokens_per_target_step_ratio": tau.point,
        "tokens_per_target_step_ratio_ci": tau.bounds,
        "decode_speed_ratio": speed.point,
        "decode_speed_ratio_ci": speed.bounds,
    }


def sums_ratio(ours: Sums, theirs: Sums, samples: int, seed: int) -> Interval:
    """Return (sum a / sum b) / (sum c / sum d) over the clusters that both have."""
    common = [cluster for cluster in ours if cluster in theirs]
    a, b, c, d = ([sums[cluster][column] for cluster in common] for sums in (ours, theirs) for column in (0, 1))
    return paired_ratio_interval(a, b, c, d, samples=samples, seed=seed)


def timings_within(timings: Iterable[Timing], prompt_ids: set[str]) -> list[Timing]:
    """Return the timings of batches of only these prompts, or none where a batch, which has one time, holds others as well."""
    touching = [timing for timing in timings if prompt_ids.intersection(timing.prompt_ids)]
    return touching if all(prompt_ids.issuperset(timing.prompt_ids) for timing in touching) else []


def sums_by_batch(timings: Sequence[Timing], mode: str, *fields: str) -> dict[tuple[str, ...], list[float]]:
    """Return sums of some fields of one mode's timings by batch; repeats and turns are no evidence of their own.

    A later turn goes on with those prompts of a batch that have one, and counts with the batch that they were first decoded in.
    """
    home: dict[tuple[str, ...], tuple[str, ...]] = {}
    first_with: dict[str, tuple[str, ...]] = {}
    for timing in timings:
        home[timing.prompt_ids] = first = first_with.get(timing.prompt_ids[0], timing.prompt_ids)
        first_with |= {prompt_id: first for prompt_id in timing.prompt_ids if prompt_id not in first_with}
    sums: dict[tuple[str, ...], list[float]] = {}
    for timing in timings:
        if timing.mode == mode:
            batch = sums.setdefault(home[timing.prompt_ids], [0.0] * len(fields))
            for place, field in enumerate(fields):
                batch[place] += getattr(timing, field)
    return sums

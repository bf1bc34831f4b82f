"""How much more this draft yields than another way of decoding that was measured in the same run, prompt by prompt.

Both intervals of the two numbers say how far each may be off by itself; what the two share, such as a prompt that is easy for
either, cancels here. That is what a gate asks when a draft must beat a free way of decoding (`eval.gate_rules`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.intervals import Interval, paired_ratio_interval
from eval.records import SPECULATIVE, Timing
from eval.speed import home_batches

Sums = Mapping[Any, Sequence[float]]  # two sums by cluster


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

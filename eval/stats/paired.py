"""Is this draft better than the previous one? Two reports on the same prompts, compared prompt by prompt. Torch-free.

The two may be a draft and its predecessor, or two artifacts; what is hard or easy about a prompt is so for both, and cancels.
tau is compared by the counts of each prompt. Speed is compared by the decode speedup over plain decoding in the same run,
by the seconds of each batch: two runs at different times, or on machines under different load, share no other clock.
Left out: whether target and settings are the same, which `eval.report.compare` says and the gate judges; prompts are never
silently dropped here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from configs.runtime.errors import InputError
from eval.stats.bootstrap import LEVEL, Floats, Interval, statistic_interval
from eval.stats.power import detectable_percent

# Shapes: C clusters (prompts, or batches of them), F columns, S bootstrap resamples.

Outcome = Literal["better", "worse", "inconclusive"]
Column = Sequence[float] | Floats
NAMED = 3  # prompts that a complaint names


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side's number as sums over clusters: those `above` multiplied, over those `below` multiplied."""

    above: tuple[Column, ...]
    below: tuple[Column, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """How one number changed. Larger is better.

    `better` and `worse` say that the whole interval of the ratio lies above or below 1. Where it holds 1, a change smaller
    than about `detectable_percent` may still be there (see `eval.stats.power`); more prompts would show it.
    """

    ours: float
    theirs: float
    ratio: float
    ratio_ci: tuple[float, float] | None
    difference: float
    difference_ci: tuple[float, float] | None
    outcome: Outcome
    detectable_percent: float | None
    num_clusters: int  # prompts, or batches of them for speed


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two reports on the prompts that both answered; `None` where one of them did not measure the number."""

    num_prompts: int
    only_ours: tuple[str, ...]
    only_theirs: tuple[str, ...]
    tokens_per_target_step: Change | None
    decode_speedup: Change | None
    batches_left_out: int  # of both reports, for speed: decoded together with others than in the other report


def compare_reports(report: Mapping[str, Any], other: Mapping[str, Any], *, allow_unequal: bool = False) -> Comparison:
    """Compare a report (ours) with another (theirs) on the prompts that both have.

    Args:
        report, other: checked reports; the bootstrap's settings are the first's.
        allow_unequal: prompts that only one of them has are listed instead of refused.

    Raises:
        InputError: the prompts come from different files, or are not the same ones, or none is in both.
    """
    if report["prompts"]["sha256"] != other["prompts"]["sha256"]:
        files = " and ".join(f"{each['prompts']['source']} ({each['prompts']['sha256'][:12]})" for each in (report, other))
        raise InputError(f"the reports cannot be paired by prompt: their prompts come from {files}, which differ")
    counts = [each["acceptance"]["per_prompt"] for each in (report, other)]
    common, only_ours, only_theirs = _split(*counts)
    if not common or ((only_ours or only_theirs) and not allow_unequal):
        raise InputError(_complaint(len(common), only_ours, only_theirs))
    tau_sides = [_tau_side(each, common) for each in counts]
    speed_sides, left_out = _speed_sides(report, other)
    settings = report["statistics"]
    bootstrap = {"samples": settings["bootstrap_samples"], "seed": settings["seed"], "level": settings["level"]}
    return Comparison(
        num_prompts=len(common),
        only_ours=tuple(only_ours),
        only_theirs=tuple(only_theirs),
        tokens_per_target_step=compare_sides(*tau_sides, **bootstrap),
        decode_speedup=compare_sides(*speed_sides, **bootstrap),
        batches_left_out=left_out,
    )


def compare_sides(ours: Side, theirs: Side, *, samples: int, seed: int, level: float = LEVEL) -> Change | None:
    """Return how `ours` differs from `theirs`, clusters in the same order; `None` where one has nothing to divide by.

    Args:
        ours, theirs: the same kind of number; every column is [clusters].
        samples, seed, level: of the bootstrap; both sides always take the same drawn clusters.
    """
    columns = (*ours.above, *ours.below, *theirs.above, *theirs.below)
    cuts = np.cumsum([len(ours.above), len(ours.below), len(theirs.above)])

    def both(sums: Floats) -> tuple[Floats, Floats]:
        a, b, c, d = (part.prod(axis=0) for part in np.split(sums, cuts))
        return a / b, c / d

    def interval(of: Any) -> Interval:
        return statistic_interval(lambda sums: of(*both(sums)), *columns, samples=samples, seed=seed, level=level)

    ratio, difference = interval(lambda one, another: one / another), interval(lambda one, another: one - another)
    if ratio.point is None or difference.point is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        own, their = both(np.array([np.sum(column, dtype=np.float64) for column in columns]))
    return Change(
        ours=float(own),
        theirs=float(their),
        ratio=ratio.point,
        ratio_ci=_bounds(ratio),
        difference=difference.point,
        difference_ci=_bounds(difference),
        outcome=_outcome(ratio),
        detectable_percent=detectable_percent((*ours.above, *theirs.below), (*ours.below, *theirs.above), level=level),
        num_clusters=int(np.stack([np.asarray(column) for column in columns]).any(axis=0).sum()),
    )


def _outcome(ratio: Interval) -> Outcome:
    if ratio.low is not None and ratio.low > 1:
        return "better"
    return "worse" if ratio.high is not None and ratio.high < 1 else "inconclusive"


def _bounds(interval: Interval) -> tuple[float, float] | None:
    return None if interval.low is None or interval.high is None else (interval.low, interval.high)


def _split(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Return the prompts of both, of ours alone and of theirs alone."""
    common = [prompt_id for prompt_id in ours if prompt_id in theirs]
    return common, [each for each in ours if each not in theirs], [each for each in theirs if each not in ours]


def _complaint(num_common: int, only_ours: Sequence[str], only_theirs: Sequence[str]) -> str:
    missing = [
        f"{len(prompts)} only in the {name} ({', '.join(prompts[:NAMED])}{', ...' * (len(prompts) > NAMED)})"
        for name, prompts in (("first", only_ours), ("second", only_theirs))
        if prompts
    ]
    found = "; ".join(missing) or "neither answered any"
    return (
        f"the reports cannot be paired by prompt: {num_common} prompts are in both, {found}; evaluate both on the same prompts"
    )


def _tau_side(counts: Mapping[str, Sequence[int]], prompt_ids: Sequence[str]) -> Side:
    committed, rounds = ([counts[prompt_id][column] for prompt_id in prompt_ids] for column in (0, 1))
    return Side(above=(committed,), below=(rounds,))


def _speed_sides(report: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[tuple[Side, Side], int]:
    """Return both reports' speedups over the batches that are in both, and how many batches of the two are not."""
    ours, theirs = (_batches(each) for each in (report, other))
    common = [batch for batch in ours if batch in theirs]
    left_out = len(ours) + len(theirs) - 2 * len(common)
    return (_speed_side(ours, common), _speed_side(theirs, common)), left_out


def _batches(report: Mapping[str, Any]) -> dict[tuple[str, ...], Mapping[str, Any]]:
    speed = report["speed"] or {}
    return {tuple(batch["prompt_ids"]): batch for batch in speed.get("per_batch") or []}


def _speed_side(batches: Mapping[tuple[str, ...], Mapping[str, Any]], common: Sequence[tuple[str, ...]]) -> Side:
    """Return (plain seconds / plain tokens) / (seconds / tokens)."""
    plain_seconds, plain_tokens = ([batches[batch]["autoregressive"][column] for batch in common] for column in (0, 1))
    seconds, tokens = ([batches[batch]["speculative"][column] for batch in common] for column in (0, 1))
    return Side(above=(plain_seconds, tokens), below=(plain_tokens, seconds))

"""What a sweep's counts say: a row for each cell with intervals over prompts, and which recipe to take.

All cells decode the same prompts, so that every comparison is paired. The intervals are about prompts alone: what the same
recipes would give from another seed of the training is not in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.files import read_json
from eval.stats.bootstrap import LEVEL, Floats, Interval, paired_ratio_interval, ratio_interval, statistic_interval
from scripts.lab.bench.harness import SEED, Counts, columns, flat


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What came of one cell.

    counts: by temperature, in the order of the sweep's config; the prompts are the same, in the same order, in all cells.
    training_seconds: of the training loop with its held-out decoding; the start of the process is not in it.
    labels: tokens that the loss was computed on, all steps together.
    """

    divergence: str
    data_policy: str | None
    counts: Mapping[float, Counts]
    training_seconds: float
    labels: int

    @property
    def name(self) -> str:
        """The cell in words."""
        return self.divergence if self.data_policy is None else f"{self.divergence} on {self.data_policy}"

    @property
    def mean_tau(self) -> float:
        """The mean over temperatures of tau, which is pooled over prompts."""
        taus = [sum(committed for committed, _ in each) / sum(rounds for _, rounds in each) for each in self.counts.values()]
        return sum(taus) / len(taus)

    @property
    def columns(self) -> list[list[float]]:
        """Committed tokens [prompts] and rounds [prompts] of each temperature, one after another."""
        return list(chain.from_iterable(columns(each) for each in self.counts.values()))


@dataclass(frozen=True, kw_only=True)
class SweepChoice:
    """Which recipe the sweep speaks for.

    beyond_noise: whether the winner is better than the first cell by more than prompts drawn anew would explain.
    level: confidence of the interval of each comparison; all of them hold together with `eval.stats.bootstrap.LEVEL`.
    comparisons: of each other cell, its mean tau and how many times the first cell's that is, by name.
    """

    winner: CellResult
    beyond_noise: bool
    level: float
    comparisons: Mapping[str, Mapping[str, float | None]]
    sentence: str


def make_rows(cells: Sequence[CellResult], undistilled: CellResult, samples: int) -> list[dict[str, Any]]:
    """Return a row for each cell, compared with the first, and one for the draft before training, all with the same keys."""
    return [_row(result, cells[0], samples) for result in (*cells, undistilled)]


def choose(cells: Sequence[CellResult], samples: int) -> SweepChoice:
    """Return the cell with the highest mean tau among those better than the first beyond noise; without any, the first.

    Of many cells some look better by chance alone. The intervals are therefore widened so that with 95 % confidence not one
    of them misses (Bonferroni: the error is shared out among the comparisons).

    Args:
        cells: the first is the one to keep unless another is better: put the simplest there.
        samples: of the bootstrap over prompts.
    """
    first, others = cells[0], cells[1:]
    level = 1 - (1 - LEVEL) / max(1, len(others))
    intervals = {other.name: mean_tau_ratio(other, first, samples, level) for other in others}
    better = [other for other in others if (intervals[other.name].low or 0.0) > 1]
    winner = max(better, key=lambda cell: cell.mean_tau, default=first)
    return SweepChoice(
        winner=winner,
        beyond_noise=winner is not first,
        level=level,
        comparisons={
            other.name: flat({"mean_tau": other.mean_tau, "mean_tau_vs_first": intervals[other.name]}) for other in others
        },
        sentence=_sentence(cells, winner, intervals, level),
    )


def mean_tau_ratio(ours: CellResult, theirs: CellResult, samples: int, level: float = LEVEL) -> Interval:
    """Return our mean tau over theirs; each resample takes the same prompts on both sides and at every temperature."""
    return statistic_interval(_mean_tau_ratio, *ours.columns, *theirs.columns, samples=samples, seed=SEED, level=level)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a sweep's results file."""
    content = read_json(path, "results of a sweep")
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "data_policy" in row for row in rows):
        raise InputError(f"{path} does not hold the rows of a sweep; make it anew with scripts/lab/sweep.py")
    return rows


def _row(result: CellResult, first: CellResult, samples: int) -> dict[str, Any]:
    taus = {
        f"tau_t{temperature:g}": ratio_interval(*columns(counts), samples=samples, seed=SEED)
        for temperature, counts in result.counts.items()
    }
    ratios = {
        f"tau_t{temperature:g}_vs_first": paired_ratio_interval(
            *columns(counts), *columns(first.counts[temperature]), samples=samples, seed=SEED
        )
        for temperature, counts in result.counts.items()
    }
    names = {"divergence": result.divergence, "data_policy": result.data_policy}
    return flat({**names, **taus, **ratios, "training_seconds": result.training_seconds, "labels": result.labels})


def _mean_tau_ratio(sums: Floats) -> Floats:
    """Return the ratio of two means of tau from sums [2 cells x temperatures x (committed, rounds), ...]."""
    ours, theirs = (sums[::2] / sums[1::2]).reshape(2, -1, *sums.shape[1:])
    ratio: Floats = ours.mean(axis=0) / theirs.mean(axis=0)
    return ratio


def _sentence(cells: Sequence[CellResult], winner: CellResult, intervals: Mapping[str, Interval], level: float) -> str:
    first, *others = cells
    if not others:
        return f"{first.name} is the only cell; there is nothing to choose from."
    best = max(cells, key=lambda cell: cell.mean_tau)
    if best is first:
        return f"The first cell, {first.name}, has the highest mean tau, {first.mean_tau:.3f}: keep it."
    shown = best if winner is first else winner
    interval = intervals[shown.name]
    bounds = "no interval" if interval.low is None else f"[{interval.low:.3f}, {interval.high:.3f}]"
    lead = f"{shown.mean_tau:.3f} against {first.mean_tau:.3f} of {first.name}, a ratio of {interval.point:.3f} {bounds}"
    if winner is first:
        return (
            f"No cell is better than the first beyond noise: keep the simplest, {first.name}. "
            f"The highest mean tau is that of {best.name}: {lead}."
        )
    return (
        f"Take {winner.name}: its mean tau is {lead}, which excludes 1 (at {100 * level:.4g} %, for {len(others)} comparisons)."
    )

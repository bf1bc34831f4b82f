"""Intervals for ratios by a bootstrap over clusters. Imports no torch, so that the gate starts quickly.

A cluster is what was drawn independently: a prompt for counts, a batch of prompts decoded together for seconds. All columns of
a statistic are taken from the same drawn clusters, which makes a comparison paired. Percentile bootstrap with the tails widened
for few clusters, as the t interval is: Hesterberg, "What Teachers Should Know About the Bootstrap" (2014), section 5.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

# Shapes: C clusters, F columns of counts or seconds, S bootstrap resamples.

Floats = NDArray[np.float64]
Column = Sequence[float] | Floats  # [clusters]
LEVEL = 0.95
DRAWS_AT_A_TIME = 1 << 20  # drawn clusters held in memory together; a constant, because the random stream is cut here


@dataclass(frozen=True)
class Interval:
    """A number and the bounds of its interval, which are `None` with fewer than two clusters to draw from."""

    point: float | None  # None: nothing to divide by
    low: float | None = None
    high: float | None = None

    @property
    def bounds(self) -> list[float] | None:
        """`[low, high]`, or `None` where there is no interval."""
        return None if self.low is None or self.high is None else [self.low, self.high]


def ratio_interval(numerators: Column, denominators: Column, *, samples: int, seed: int) -> Interval:
    """Return sum(numerators) / sum(denominators) with its interval: a pooled ratio, not the mean of ratios."""
    return statistic_interval(lambda sums: sums[0] / sums[1], numerators, denominators, samples=samples, seed=seed)


def paired_ratio_interval(a: Column, b: Column, c: Column, d: Column, *, samples: int, seed: int) -> Interval:
    """Return (sum a / sum b) / (sum c / sum d) with its interval; what both sides share cancels in each resample."""
    return statistic_interval(lambda sums: (sums[0] / sums[1]) / (sums[2] / sums[3]), a, b, c, d, samples=samples, seed=seed)


def statistic_interval(statistic: Callable[[Floats], Floats], *columns: Column, samples: int, seed: int) -> Interval:
    """Return a statistic of column sums [columns, or columns x resamples] with its interval; clusters of zeros are left out."""
    columns_FC = np.stack([np.asarray(column, dtype=np.float64) for column in columns])
    if not np.isfinite(columns_FC).all():
        raise ValueError("counts and times must be finite")
    columns_FC = np.ascontiguousarray(columns_FC[:, (columns_FC != 0).any(axis=0)])
    num_clusters = columns_FC.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        point = float(statistic(columns_FC.sum(axis=1)))
        if not math.isfinite(point):
            return Interval(None)
        if num_clusters < 2:
            return Interval(point)
        # One column at a time: gathering single numbers is several times faster than gathering rows of two or four.
        sums_SF = [
            [column_C[drawn_SC].sum(axis=1) for column_C in columns_FC] for drawn_SC in _draws(num_clusters, samples, seed)
        ]
        values_S = statistic(np.concatenate(sums_SF, axis=1))
    values_S = values_S[np.isfinite(values_S)]  # a resample without a single round says nothing about a ratio per round
    return Interval(point, *_percentiles(values_S, num_clusters)) if values_S.size else Interval(point)


def _draws(num_clusters: int, samples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield indices of drawn clusters, [some of the samples, num_clusters] at a time."""
    generator = np.random.default_rng(seed)
    step = max(1, DRAWS_AT_A_TIME // num_clusters)
    for start in range(0, samples, step):
        yield generator.integers(num_clusters, size=(min(step, samples - start), num_clusters))


def _percentiles(values_S: Floats, num_clusters: int) -> tuple[float, float]:
    quantile = student_quantile((1 + LEVEL) / 2, num_clusters - 1)
    tail = NormalDist().cdf(-quantile * math.sqrt(num_clusters / (num_clusters - 1)))
    low, high = np.quantile(values_S, [tail, 1 - tail])
    return float(low), float(high)


def student_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution."""
    from scipy.special import stdtrit  # here, because its import takes half a second

    return float(stdtrit(degrees, probability))

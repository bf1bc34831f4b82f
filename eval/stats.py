"""Intervals for ratios of sums over clusters, a test of counts, and power. Imports no torch: the gate starts quickly.

A cluster is what was drawn independently: a prompt for counts, a batch of prompts decoded together for seconds. The interval is
Student's t over clusters with the jackknife's standard error (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
chapter 11); that of a ratio is taken of its logarithm. Leaving a cluster out leaves it out of all columns, which makes a
comparison paired. Below `MIN_CLUSTERS` clusters there is no interval.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Shapes: C clusters, F columns of counts or seconds.

Floats = NDArray[np.float64]
Column = Sequence[float] | Floats  # [clusters]
LEVEL = 0.95
POWER = 0.8  # of the test that finds a detectable effect
EXACT_FLIPS, NUM_FLIPS = 12, 20_000  # of signs, in `sign_flip_p_value`
TINY = 1e-12  # of a sum: its rounding error
MIN_CLUSTERS = 3  # by which an interval holds the truth as often as it says (tests/eval/test_stats.py)


@dataclass(frozen=True)
class Interval:
    """A number and the bounds of its interval, which are `None` with fewer than `MIN_CLUSTERS` clusters."""

    point: float | None  # None: nothing to divide by
    low: float | None = None
    high: float | None = None

    @property
    def bounds(self) -> list[float] | None:
        """`[low, high]`, or `None` where there is no interval."""
        return None if self.low is None or self.high is None else [self.low, self.high]


def fields_of(found: Mapping[str, Interval]) -> dict[str, float | list[float] | None]:
    """Return the points by name, and the bounds by that name and `_ci`, as a report has them."""
    return {name: each.point for name, each in found.items()} | {f"{name}_ci": each.bounds for name, each in found.items()}


def ratio_interval(numerators: Column, denominators: Column) -> Interval:
    """Return sum(numerators) / sum(denominators) with its interval: a pooled ratio, not the mean of ratios."""
    return statistic_interval(lambda sums: sums[0] / sums[1], numerators, denominators, is_ratio=True)


def paired_ratio_interval(a: Column, b: Column, c: Column, d: Column) -> Interval:
    """Return (sum a / sum b) / (sum c / sum d) with its interval; what both sides share of a cluster cancels."""
    return statistic_interval(lambda sums: (sums[0] / sums[1]) / (sums[2] / sums[3]), a, b, c, d, is_ratio=True)


def statistic_interval(statistic: Callable[[Floats], Floats], *columns: Column, is_ratio: bool = False) -> Interval:
    """Return a statistic of column sums `[F]` (or of several such, `[F, C]`) with its interval; clusters of zeros are left out.

    The interval of a ratio, whose columns are not negative, is that of its logarithm where no cluster alone lifts it above 0;
    else it is the ratio's own, from 0. With C clusters the standard error is sqrt((C - 1) / C sum_c (s_c - mean s)^2); s_c is
    the statistic of all clusters but c.
    """
    columns_FC = np.stack([np.asarray(column, dtype=np.float64) for column in columns])
    if not np.isfinite(columns_FC).all():
        raise ValueError("counts and times must be finite")
    columns_FC = columns_FC[:, (columns_FC != 0).any(axis=0)]
    sums_F, num_clusters = columns_FC.sum(axis=1), columns_FC.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        point, without_C = float(statistic(sums_F)), statistic(sums_F[:, None] - columns_FC)
    if not math.isfinite(point):
        return Interval(None)
    if num_clusters < MIN_CLUSTERS or not np.isfinite(without_C).all():
        return Interval(point)
    by_logarithm = is_ratio and min(point, without_C.min()) > 0
    moved_C = np.log(without_C / point) if by_logarithm else without_C - point
    error = math.sqrt((num_clusters - 1) * float(moved_C.var()))
    margin = student_quantile((1 + LEVEL) / 2, num_clusters - 1) * error
    if by_logarithm:
        return Interval(point, point * math.exp(-margin), point * math.exp(margin))
    return Interval(point, max(point - margin, 0.0) if is_ratio else point - margin, point + margin)


def student_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution."""
    from scipy.special import stdtrit  # here, because its import takes half a second

    return float(stdtrit(degrees, probability))


# --- a test of counts, and power ------------------------------------------------------------------------------------


class GTest(NamedTuple):
    """Result of a G-test. `p_value` is `None` with fewer than two cells or no sample."""

    statistic: float
    degrees_of_freedom: int
    p_value: float | None


def g_test(counts: Sequence[int], probabilities: Sequence[float]) -> GTest:
    """Return how well counts fit probabilities that are known beforehand: G = 2 sum_i n_i ln(n_i / (N p_i)).

    G is divided by Williams' correction 1 + (sum_i 1/p_i - 1) / (6 N (cells - 1)), which gives it the mean of chi-square up to
    1/N (Biometrika 63, 1976). Cells should be pooled to an expected count of about 5.
    """
    from scipy.special import chdtrc

    counts_C, probabilities_C = np.asarray(counts, np.float64), np.asarray(probabilities, np.float64)
    total, degrees = counts_C.sum(), counts_C.size - 1
    if degrees < 1 or total == 0:
        return GTest(0.0, degrees, None)
    seen = counts_C > 0
    statistic = 2 * float((counts_C[seen] * np.log(counts_C[seen] / (total * probabilities_C[seen]))).sum())
    statistic /= 1 + float((1 / probabilities_C).sum() - 1) / (6 * float(total) * degrees)
    return GTest(statistic, degrees, float(chdtrc(degrees, max(statistic, 0.0))))


def sign_flip_p_value(differences: Column) -> float:
    """Return the chance that paired differences sum to as much as these, or more, were each as likely of the other sign.

    Exact up to `EXACT_FLIPS` differences that are not 0 (Fisher's randomisation test, The Design of Experiments, 1935, section
    21), else by `NUM_FLIPS` drawn sets of signs, of which the observed one is one more.
    """
    own_D = np.asarray(differences, np.float64)
    own_D = own_D[own_D != 0]
    least = own_D.sum() - TINY * np.abs(own_D).sum()
    if len(own_D) <= EXACT_FLIPS:
        return float((np.array(list(itertools.product((1.0, -1.0), repeat=len(own_D)))) @ own_D >= least).mean())
    generator = np.random.default_rng(0)
    flips = (generator.choice((1.0, -1.0), (1000, len(own_D))) for _ in range(NUM_FLIPS // 1000))
    return (1 + sum(int((flips_SD @ own_D >= least).sum()) for flips_SD in flips)) / (1 + NUM_FLIPS)


# --- detectable effects -------------------------------------------------------------------------------------------


def detectable_percent(numerators: Column, denominators: Column) -> float | None:
    """Return the least change that shows of sum(numerators) / sum(denominators) against a fixed number, in percent of it.

    A two-sided test finds it with probability `POWER`: it is (t_{n-1}((1 + level) / 2) + t_{n-1}(power)) standard errors, with
    Student's quantiles for n prompts. The standard error is that of the linearisation (Cochran, Sampling Techniques, 1977,
    chapter 6): prompt i moves sum c / sum r by c_i / sum c - r_i / sum r of it. `None` with fewer than two prompts, or where a
    sum is 0.
    """
    columns_2P = np.stack([np.asarray(column, np.float64) for column in (numerators, denominators)])
    columns_2P = columns_2P[:, columns_2P.any(axis=0)]
    sums_21, num_prompts = columns_2P.sum(axis=1, keepdims=True), columns_2P.shape[1]
    if num_prompts < 2 or not sums_21.all():
        return None
    numerator_P, denominator_P = columns_2P / sums_21
    moves_P = numerator_P - denominator_P
    standard_error = math.sqrt(num_prompts / (num_prompts - 1) * float(moves_P @ moves_P))
    quantiles = [student_quantile(probability, num_prompts - 1) for probability in ((1 + LEVEL) / 2, POWER)]
    return 100 * sum(quantiles) * standard_error


def detectable_variation(num_samples: int, degrees: int, *, level: float = LEVEL) -> float | None:
    """Return the total variation from which on every departure from known probabilities shows in a G-test of samples.

    Under another distribution q than p, G is near noncentral chi-square with noncentrality N sum_i (q_i - p_i)^2 / p_i (Cohen,
    Statistical Power Analysis, 1988, chapter 7), and by Cauchy and Schwarz that sum is at least 4 times the squared total
    variation. A departure on unlikely cells shows sooner. `None` with fewer than two cells, or no sample.
    """
    from scipy.special import chdtri, chndtrinc

    if degrees < 1 or num_samples == 0:
        return None
    noncentrality = float(chndtrinc(chdtri(degrees, 1 - level), degrees, 1 - POWER))
    return min(1.0, math.sqrt(noncentrality / num_samples) / 2)

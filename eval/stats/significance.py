"""Tests of a hypothesis, for the losslessness verdict: do samples follow a known distribution, do pairs differ on average?

Imports no torch. Intervals are in `eval.stats.bootstrap`, the number of prompts a test needs in `eval.stats.power`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.stats.bootstrap import DRAWS_AT_A_TIME, Column

SIGN_FLIPS = 9_999  # a p-value is then at least 2e-4


@dataclass(frozen=True, kw_only=True)
class GTest:
    """Result of a G-test. `p_value` is `None` with fewer than two cells or no sample."""

    statistic: float
    degrees_of_freedom: int
    p_value: float | None


def g_test(counts: Sequence[int], probabilities: Sequence[float]) -> GTest:
    """Return how well counts fit a distribution that is known beforehand: G = 2 sum_i n_i ln(n_i / (N p_i)).

    G is divided by Williams' correction 1 + (sum_i 1/p_i - 1) / (6 N (cells - 1)), which gives it the mean of chi-square up to
    1/N (Williams, Biometrika 63, 1976), and then compared with chi-square of cells - 1 degrees of freedom.

    Args:
        counts: samples in each cell.
        probabilities: of each cell; positive, with sum 1. Cells should be pooled to an expected count of about 5.

    Raises:
        ValueError: a probability is not positive, or they do not sum to 1.
    """
    counts_C, probabilities_C = np.asarray(counts, np.float64), np.asarray(probabilities, np.float64)
    if not (probabilities_C > 0).all() or abs(probabilities_C.sum() - 1) > 1e-6:
        raise ValueError("probabilities must be positive and sum to 1")
    total, degrees = counts_C.sum(), counts_C.size - 1
    if degrees < 1 or total == 0:
        return GTest(statistic=0.0, degrees_of_freedom=degrees, p_value=None)
    seen = counts_C > 0
    statistic = 2 * float((counts_C[seen] * np.log(counts_C[seen] / (total * probabilities_C[seen]))).sum())
    statistic /= 1 + float((1 / probabilities_C).sum() - 1) / (6 * float(total) * degrees)
    return GTest(statistic=statistic, degrees_of_freedom=degrees, p_value=chi_square_tail(statistic, degrees))


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Return the probability that chi-square of so many degrees of freedom is at least `statistic`."""
    from scipy.special import chdtrc  # here, because its import takes half a second

    return float(chdtrc(degrees, max(statistic, 0.0)))


def sign_flip_test(differences: Column, *, seed: int, flips: int = SIGN_FLIPS) -> float:
    """Return the two-sided p-value of the hypothesis that differences have mean 0, by giving them random signs.

    Exact where a difference is as likely as its opposite, as with two independent samples of one distribution. Else right in
    the limit of many: signs leave the sum of squares as it is, so that comparing sums is comparing t statistics.

    Args:
        differences: [clusters], one each.
        seed: of the signs; equal arguments give equal answers.
        flips: how many assignments of signs are tried, or all of them where they are fewer.
    """
    from scipy.stats import permutation_test  # here, because its import takes a second

    values_C = np.asarray(differences, np.float64)
    batch = max(1, DRAWS_AT_A_TIME // values_C.size)
    found = permutation_test(
        (values_C,), np.sum, permutation_type="samples", vectorized=True, n_resamples=flips, batch=batch, rng=seed
    )
    return float(found.pvalue)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values adjusted for being several: rejecting those at most `level` raises a false alarm at most that often.

    Holm's step-down procedure: the i-th smallest of m is multiplied by m - i + 1, and none ends below one before it (Holm,
    Scandinavian Journal of Statistics 6, 1979). It holds however the tests depend on each other.
    """
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}

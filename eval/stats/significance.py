"""A test of counts, and the least effect that so many observations would show. Imports no torch.

scipy is imported where it is used: it takes a second. C cells or clusters (here prompts), F columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eval.stats.bootstrap import LEVEL, Column, student_quantile

POWER = 0.8


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


# --- detectable effects -------------------------------------------------------------------------------------------


def detectable_percent(above: Sequence[Column], below: Sequence[Column]) -> float | None:
    """Return the least change that shows of sum(above[0]) sum(above[1]) ... / (sum(below[0]) ...), in percent of it.

    A two-sided test finds it with probability `POWER`: it is (t_{n-1}((1 + level) / 2) + t_{n-1}(power)) standard errors, with
    Student's quantiles for n prompts.

    The standard error is that of the linearisation (Cochran, Sampling Techniques, 1977, chapter 6): prompt i moves sum c / sum
    r by c_i / sum c - r_i / sum r of it. Two ratios on the same prompts have one side's numerators and the other's denominators
    above, so that what they share cancels. `None` with fewer than two prompts, or where a sum is 0.
    """
    columns_FC = np.stack([np.asarray(column, np.float64) for column in (*above, *below)])
    columns_FC = columns_FC[:, columns_FC.any(axis=0)]
    sums_F1, num_prompts = columns_FC.sum(axis=1, keepdims=True), columns_FC.shape[1]
    if num_prompts < 2 or not sums_F1.all():
        return None
    shares_FC = columns_FC / sums_F1
    moves_C = shares_FC[: len(above)].sum(axis=0) - shares_FC[len(above) :].sum(axis=0)
    moves_C -= moves_C.mean()  # they sum to 0 where as many columns are above as below
    standard_error = math.sqrt(num_prompts / (num_prompts - 1) * float(moves_C @ moves_C))
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

"""Minimal detectable effects: how small a change would so many prompts show? Imports no torch.

The true change that a two-sided test at some level finds with some probability, its power: (t_{n-1}((1 + level) / 2) +
t_{n-1}(power)) * standard error, with Student's quantiles for n prompts. The standard error of a ratio of sums is that of its
linearisation (Cochran, Sampling Techniques, 1977, chapter 6): prompt i moves sum c / sum r by c_i / sum c - r_i / sum r of it.
For a test of counts the change is in total variation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from eval.stats.bootstrap import LEVEL, Column, student_quantile

# Shapes: C clusters, here prompts; F columns.

POWER = 0.8


def detectable_percent(above: Sequence[Column], below: Sequence[Column]) -> float | None:
    """Return the least change of a ratio of sums that shows, in percent of it.

    The ratio is of products: sum(above[0]) sum(above[1]) ... / (sum(below[0]) ...). Committed tokens above and rounds below
    give tau, and how far it must lie from a fixed number to show. Two taus on the same prompts have one side's tokens and the
    other's rounds above; what both share, such as an easy prompt, then cancels prompt by prompt.

    Columns are [prompts] in the same order; prompts with zeros in all of them do not count. `None` with fewer than two
    prompts, or where a sum is 0.
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
    return 100 * _quantiles(num_prompts, LEVEL) * standard_error


def detectable_mean(differences: Column, *, level: float = LEVEL) -> float | None:
    """Return the least distance of a mean from 0 that shows, in the unit of `differences` [prompts]; `None` with under two."""
    values_C = np.asarray(differences, np.float64)
    if values_C.size < 2:
        return None
    return _quantiles(values_C.size, level) * float(values_C.std(ddof=1)) / math.sqrt(values_C.size)


def detectable_variation(num_samples: int, degrees: int, *, level: float = LEVEL) -> float | None:
    """Return the total variation from which on every departure from known probabilities shows in a G-test of samples.

    Under another distribution q than p, G is near noncentral chi-square with noncentrality N sum_i (q_i - p_i)^2 / p_i (Cohen,
    Statistical Power Analysis, 1988, chapter 7), and by Cauchy and Schwarz that sum is at least 4 times the squared total
    variation of the cells. A departure on unlikely cells shows sooner. `None` with fewer than two cells, or no sample.
    """
    from scipy.special import chdtri, chndtrinc  # here, because its import takes half a second

    if degrees < 1 or num_samples == 0:
        return None
    noncentrality = float(chndtrinc(chdtri(degrees, 1 - level), degrees, 1 - POWER))
    return min(1.0, math.sqrt(noncentrality / num_samples) / 2)


def _quantiles(num_prompts: int, level: float) -> float:
    degrees = num_prompts - 1
    return student_quantile((1 + level) / 2, degrees) + student_quantile(POWER, degrees)

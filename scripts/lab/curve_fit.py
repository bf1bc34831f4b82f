"""What more data would bring: a power law through tau at several sizes of the same trial, checked where there is a further one.

What a round misses to its most tokens falls as a power of the answer tokens trained on, `most - tau = c * tokens ** -exponent`
(Kaplan et al. 2020, arXiv 2001.08361), fitted by least squares on logarithms. Intervals are over prompts. K sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from eval.stats.bootstrap import Floats, Interval, statistic_interval
from scripts.lab.measuring import SEED, Counts, columns

MIN_GAP = 1e-6


@dataclass(frozen=True, kw_only=True)
class CurveCheck:
    """The fit to all sizes but the last held against that one, which it has to meet within the interval of the difference."""

    tokens: int
    predicted: Interval
    measured: Interval
    difference: Interval  # measured less predicted, on the same prompts

    @property
    def holds(self) -> bool:
        low, high = self.difference.low, self.difference.high
        return low is None or high is None or low <= 0 <= high


@dataclass(frozen=True, kw_only=True)
class DataCurve:
    """The fit to all sizes: tau by answer tokens, as measured and as predicted for other sizes."""

    measured: Mapping[int, Interval]
    exponent: Interval  # 0 where data bring nothing
    predicted: Mapping[int, Interval]
    check: CurveCheck | None  # None with fewer than three sizes


def fit_curve(counts: Mapping[int, Counts], most: int, *, sizes: Sequence[int], samples: int) -> DataCurve:
    """Fit tau against answer tokens, and predict it at other `sizes`; `counts` are of the same prompts in the same order."""
    tokens = sorted(counts)
    interval = partial(statistic_interval, samples=samples, seed=SEED)
    rows = [column for size in tokens for column in columns(counts[size])]
    measured = {size: interval(lambda sums: sums[0] / sums[1], *columns(counts[size])) for size in tokens}
    check = None
    if len(tokens) > 2:
        *fitted, last = tokens
        check = CurveCheck(
            tokens=last,
            predicted=interval(lambda sums: _predict(sums, fitted, most, last), *rows[:-2]),
            measured=measured[last],
            difference=interval(lambda sums: _taus(sums)[-1] - _predict(sums[:-2], fitted, most, last), *rows),
        )
    return DataCurve(
        measured=measured,
        exponent=interval(lambda sums: -_fit(sums, tokens, most)[0], *rows),
        predicted={size: interval(partial(_predict, tokens=tokens, most=most, at=size), *rows) for size in sizes},
        check=check,
    )


def _taus(sums: Floats) -> Floats:
    taus: Floats = sums[::2] / sums[1::2]
    return taus


def _fit(sums: Floats, tokens: Sequence[int], most: int) -> tuple[Floats, Floats]:
    """Return slope and mean height of the line through the logarithms; `sums` are [2 K] or [2 K, resamples]."""
    logs_K = np.log(tokens) - np.mean(np.log(tokens))
    gaps_K = np.log(np.maximum(most - _taus(sums), MIN_GAP))
    slope: Floats = np.tensordot(logs_K, gaps_K, axes=1) / np.square(logs_K).sum()
    return slope, gaps_K.mean(axis=0)


def _predict(sums: Floats, tokens: Sequence[int], most: int, at: int) -> Floats:
    slope, height = _fit(sums, tokens, most)
    predicted: Floats = most - np.exp(height + slope * (np.log(at) - np.mean(np.log(tokens))))
    return predicted

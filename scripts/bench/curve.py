"""What more data brings: a power law through tokens per target step at several sizes of the same training.

What a round misses to its most tokens falls as a power of the answer tokens trained on, `most - tau = c * tokens ** -exponent`
(Kaplan et al. 2020, arXiv 2001.08361), fitted by least squares on logarithms. Intervals are over prompts. K sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from eval.stats import Floats, statistic_interval
from scripts.bench.harness import SEED, flat

SAMPLES = 2000
MIN_GAP = 1e-6
DOUBLINGS = (2, 4)  # of the most answer tokens that were trained on: what so many would bring is predicted


class Measured(NamedTuple):
    """What was counted of a head on a suite."""

    family: str
    recipe: str
    suite: str
    answer_tokens: int
    epochs: int
    training_seconds: float
    most: int  # tokens that a round commits
    counts: list[tuple[int, int]]  # by prompt: committed tokens and rounds

    @property
    def columns(self) -> list[list[float]]:
        return [[float(each[place]) for each in self.counts] for place in (0, 1)]


def fit_rows(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return a row for each measurement, with what the law through its curve leaves over, and one for each law."""
    curves: dict[tuple[str, str], list[Measured]] = {}
    for each in sorted(measured, key=lambda each: each.answer_tokens):
        curves.setdefault((each.recipe, each.suite), []).append(each)
    rows, laws = [], []
    interval = partial(statistic_interval, samples=SAMPLES, seed=SEED)
    for own in curves.values():
        tokens, most = [each.answer_tokens for each in own], own[0].most
        columns = [column for each in own for column in each.columns]
        predicted = {size: partial(_predict, tokens=tokens, most=most, at=size) for size in (*tokens, *_further(tokens))}
        for each in own:
            named = {name: value for name, value in each._asdict().items() if name not in ("most", "counts")}
            row = flat({"row": "measured", **named, "tau": interval(lambda sums: sums[0] / sums[1], *each.columns)})
            fitted = interval(predicted[each.answer_tokens], *columns).point if len(own) > 1 else None
            rows.append(row | {"less_law": None if fitted is None else row["tau"] - fitted})
        if len(own) > 1:
            law: dict[str, Any] = {"row": "law", "family": own[0].family, "recipe": own[0].recipe, "suite": own[0].suite}
            law["exponent"] = interval(partial(_exponent, tokens=tokens, most=most), *columns)
            for times, size in zip(DOUBLINGS, _further(tokens), strict=True):
                law[f"tau_at_{times}_times"] = interval(predicted[size], *columns)
            laws.append(flat(law))
    return rows + laws


def _further(tokens: Sequence[int]) -> list[int]:
    return [times * tokens[-1] for times in DOUBLINGS]


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


def _exponent(sums: Floats, tokens: Sequence[int], most: int) -> Floats:
    return -_fit(sums, tokens, most)[0]

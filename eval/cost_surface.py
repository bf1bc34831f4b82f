"""What a part of a round costs as a function of its sizes: measured where it was measured, fitted beyond.

The fit is a sum of terms that only grow (a floor, so much a token, more where tokens exceed some numbers, so much a token of
context), its factors found by least squares of the relative errors under the condition that none is negative. On a CPU a
forward does not grow smoothly with its tokens; so the fit is multiplied by what was measured over what it says, on straight
lines between the sizes measured and level beyond. At measured sizes that gives back the measured values.
R measurements, F terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Sizes = tuple[int, int, int]  # drafts, batch, context
Terms = Callable[[int, float, float], Sequence[float]]

KNEES = (8, 32, 128)  # tokens in a forward from which each further one may cost more
STANDS_STILL = 1e-12


def forward_terms(drafts: int, batch: float, context: float) -> list[float]:
    """Return the terms of the target's forward: a floor, its tokens, the keys and values it reads, the attention's products."""
    tokens = batch * (drafts + 1)
    return [1.0, tokens, *(max(0.0, tokens - knee) for knee in KNEES), batch * context, tokens * context]


def drafting_terms(drafts: int, batch: float, context: float) -> list[float]:
    """Return the terms of drafting: once a round and once a draft, each with its floor, its rows and their context."""
    return [1.0, batch, batch * context, drafts, drafts * batch, drafts * max(0.0, batch - KNEES[0]), drafts * batch * context]


def other_terms(drafts: int, batch: float, context: float) -> list[float]:
    """Return the terms of judging and of the rest: the floor, and the rows of logits."""
    return [1.0, batch * (drafts + 1)]


class Surface:
    """A cost by number of drafts, batch and context.

    Args:
        measured: costs by sizes, none negative. All batches were measured in the first context, all contexts in the first
            batch, for every number of drafts.
        terms: of the fit.
    """

    def __init__(self, measured: Mapping[Sizes, float], terms: Terms) -> None:
        self.terms = terms
        self.factors_F = fit_factors([terms(*sizes) for sizes in measured], list(measured.values()))
        self._ratios = {sizes: self._ratio(sizes, cost) for sizes, cost in measured.items()}
        self._first_batch = min(batch for _, batch, _ in measured)
        self._first_context = min(context for _, _, context in measured)

    def fit(self, drafts: int, batch: float, context: float) -> float:
        """Return what the fit alone says."""
        return float(np.dot(self.factors_F, self.terms(drafts, batch, context)))

    def __call__(self, drafts: int, batch: float, context: float) -> float:
        """Return the cost; `drafts` is one of those measured.

        Raises:
            ValueError: it is not.
        """
        own = {sizes: ratio for sizes, ratio in self._ratios.items() if sizes[0] == drafts}
        if not own:
            raise ValueError(f"rounds of {drafts} drafts were not measured")
        batches = {math.log(size): ratio for (_, size, other), ratio in own.items() if other == self._first_context}
        contexts = {float(size): ratio for (_, other, size), ratio in own.items() if other == self._first_batch}
        corner = own[drafts, self._first_batch, self._first_context]
        along = _between(batches, math.log(batch)) * _between(contexts, context) / corner
        return self.fit(drafts, batch, context) * along

    def _ratio(self, sizes: Sizes, cost: float) -> float:
        fitted = self.fit(*sizes)
        return cost / fitted if fitted > 0 and cost > 0 else 1.0


def fit_factors(terms_RF: Sequence[Sequence[float]], costs_R: Sequence[float]) -> Floats:
    """Return the factors, none negative, that make the squared relative errors least; measurements of 0 are left out.

    Lawson and Hanson's active-set method ("Solving Least Squares Problems", chapter 23).
    """
    kept_R = np.asarray(costs_R) > 0
    rows_RF = np.asarray(terms_RF, dtype=np.float64)[kept_R] / np.asarray(costs_R)[kept_R, None]
    scale_F = np.linalg.norm(rows_RF, axis=0)
    scale_F[scale_F == 0] = 1.0
    matrix_RF = rows_RF / scale_F
    goal_R = np.ones(len(matrix_RF))
    factors_F = np.zeros(matrix_RF.shape[1])
    free_F = np.zeros(len(factors_F), dtype=bool)
    for _ in range(3 * len(factors_F)):
        gain_F = np.where(free_F, -np.inf, matrix_RF.T @ (goal_R - matrix_RF @ factors_F))
        if gain_F.max() <= STANDS_STILL:
            break
        free_F[gain_F.argmax()] = True
        factors_F = _solve_free(matrix_RF, goal_R, factors_F, free_F)
    return factors_F / scale_F


def _solve_free(matrix_RF: Floats, goal_R: Floats, factors_F: Floats, free_F: NDArray[np.bool_]) -> Floats:
    """Solve for the free factors, and let go of those that would turn negative, the first on the way there first."""
    while True:
        solved_F = np.zeros_like(factors_F)
        solved_F[free_F] = np.linalg.lstsq(matrix_RF[:, free_F], goal_R, rcond=None)[0]
        negative_F = free_F & (solved_F <= 0)
        if not negative_F.any():
            return solved_F
        step = (factors_F[negative_F] / (factors_F[negative_F] - solved_F[negative_F] + STANDS_STILL)).min()
        factors_F = factors_F + step * (solved_F - factors_F)
        free_F &= factors_F > STANDS_STILL
        factors_F[~free_F] = 0.0


def _between(values: Mapping[float, float], place: float) -> float:
    places = sorted(values)
    return float(np.interp(place, places, [values[each] for each in places]))

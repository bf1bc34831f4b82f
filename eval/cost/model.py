"""The cost model: what speculation gains by number of drafts, batch and context, on this machine or on another one.

Expected seconds are expected rounds (`eval.cost.expected_rounds`) times what a round takes: drafting, the target's forward over
one row more than drafts, and the rest. On this machine those come from the timing sweep (`eval.cost.model`); for another
one the sweep's work, in bytes and operations, is divided by its bandwidth and speed, whichever takes longer (the roofline of
Williams et al., CACM 2009), with nothing for launching kernels: what small models lose to that shows as too much speed.
A batch is taken to stay full, as a server keeps it; its rows differ in how much they keep, and the one that kept most decides
what the draft reads next.


What a part of a round costs as a function of its sizes: measured where it was measured, fitted beyond.

The fit is a sum of terms that only grow (a floor, so much a token, more where tokens exceed some numbers, so much a token of
context), its factors found by least squares of the relative errors under the condition that none is negative. On a CPU a
forward does not grow smoothly with its tokens; so the fit is multiplied by what was measured over what it says, on straight
lines between the sizes measured and level beyond. At measured sizes that gives back the measured values.
R measurements, F terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from eval.cost.expected_rounds import AcceptanceProfile, AnswerLength, Floats, expected_rounds
from eval.cost.timing_sweep import TimedRound

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


BATCHES_SHOWN = (1, 2, 4, 8, 16, 32, 64)
LARGEST_BATCH = 1024  # none beyond is looked at


class Costs(Protocol):
    """Seconds of a round's parts by number of drafts, batch and context."""

    def round_seconds(self, drafts: int, batch: int, context: float, after_full: float) -> float:
        """Return the seconds of a whole round, `after_full` being the chance that the round before kept all drafts."""


class MeasuredCosts:
    """This machine's, from the timing sweep."""

    def __init__(self, sweep: Sequence[TimedRound]) -> None:
        self.verify = _surface(sweep, lambda each: each.verify_seconds, forward_terms)
        self.other = _surface(sweep, lambda each: each.other_seconds, other_terms)
        speculative = [each for each in sweep if each.num_speculative_tokens]
        self.draft = _surface(speculative, lambda each: each.draft_seconds, drafting_terms)
        self.draft_after_full = _surface(speculative, lambda each: each.draft_seconds_after_full, drafting_terms)

    def round_seconds(self, drafts: int, batch: int, context: float, after_full: float) -> float:
        sizes = drafts, batch, context
        seconds = self.verify(*sizes) + self.other(*sizes)
        if drafts:
            seconds += (1 - after_full) * self.draft(*sizes) + after_full * self.draft_after_full(*sizes)
        return seconds


class RooflineCosts:
    """Another machine's, from the work.

    Args:
        sweep: whose work counts, not its seconds.
        bytes_per_second: at which it reads memory.
        flops_per_second: of its matrix products in the dtype that was swept.
    """

    def __init__(self, sweep: Sequence[TimedRound], bytes_per_second: float, flops_per_second: float) -> None:
        self.bytes_per_second, self.flops_per_second = bytes_per_second, flops_per_second
        speculative = [each for each in sweep if each.num_speculative_tokens]
        self.verify_bytes = _surface(sweep, lambda each: each.verify_bytes, forward_terms)
        self.verify_flops = _surface(sweep, lambda each: each.verify_flops, forward_terms)
        self.draft_bytes = _surface(speculative, lambda each: each.draft_bytes, drafting_terms)
        self.draft_flops = _surface(speculative, lambda each: each.draft_flops, drafting_terms)

    def round_seconds(self, drafts: int, batch: int, context: float, after_full: float) -> float:
        sizes = drafts, batch, context
        seconds = self._longer(self.verify_bytes(*sizes), self.verify_flops(*sizes))
        return seconds + self._longer(self.draft_bytes(*sizes), self.draft_flops(*sizes)) if drafts else seconds

    def _longer(self, num_bytes: float, num_flops: float) -> float:
        return max(num_bytes / self.bytes_per_second, num_flops / self.flops_per_second)


class CostModel:
    """Predicts decode speedups.

    Args:
        costs: of a round.
        profile: the acceptance.
        answers: how long the answers are.
        longest: the most drafts of a round that the costs know.
    """

    def __init__(self, costs: Costs, profile: AcceptanceProfile, answers: Iterable[AnswerLength], longest: int) -> None:
        self.costs, self.profile, self.longest = costs, profile, longest
        answers = list(answers)
        self.num_tokens = sum(answer.num_tokens * answer.num_answers for answer in answers)
        self._rounds: Callable[[int], Floats] = cache(lambda drafts: expected_rounds(profile, drafts, answers))

    def speedup(self, drafts: int, batch: int, context: float) -> float:
        """Return plain decoding's seconds over those with as many drafts a round."""
        plain = self.num_tokens * self.costs.round_seconds(0, batch, context, 0.0)
        # The few shorter rounds at an answer's end follow whole ones.
        after_full = 1 - (1 - float(self.profile.accepted(drafts)[-1])) ** batch
        rounds_G = self._rounds(drafts)
        seconds_G = [self.costs.round_seconds(own, batch, context, after_full) for own in range(drafts + 1)]
        return float(plain / np.dot(rounds_G, seconds_G))

    def tau(self, drafts: int) -> float:
        """Return the tokens per target step, shorter rounds at the answers' ends included."""
        return float(self.num_tokens / self._rounds(drafts).sum())

    def best(self, batch: int, context: float) -> tuple[int, float]:
        """Return the fastest number of drafts, and its speedup, be it below 1."""
        speedups = {drafts: self.speedup(drafts, batch, context) for drafts in range(1, self.longest + 1)}
        drafts = max(speedups, key=lambda each: speedups[each])
        return drafts, speedups[drafts]

    def break_even_batch(self, context: float) -> int | None:
        """Return the largest batch at which some number of drafts pays: 0 if none does, None if all up to `LARGEST_BATCH` do.

        Looked for among powers of two, then between the two where it ceases to pay for good.
        """
        powers = [2**power for power in range(LARGEST_BATCH.bit_length())]
        paying = [batch for batch in powers if self._pays(batch, context)]
        if not paying:
            return 0
        pays, fails = paying[-1], 2 * paying[-1]
        if fails > LARGEST_BATCH:
            return None
        while fails - pays > 1:
            middle = (pays + fails) // 2
            pays, fails = (middle, fails) if self._pays(middle, context) else (pays, middle)
        return pays

    def _pays(self, batch: int, context: float) -> bool:
        return self.best(batch, context)[1] > 1


def summarise_model(model: CostModel, drafts: int, batch: int, context: int, other_contexts: Iterable[int]) -> dict[str, Any]:
    """Return the numbers of the report's `speed.predicted`.

    Args:
        model: the cost model.
        drafts, batch, context: of the run that was measured.
        other_contexts: for which settings are listed too.
    """
    fastest, speedup = model.best(batch, context)
    settings = [
        {
            "num_speculative_tokens": each,
            "batch_size": size,
            "context_tokens": length,
            "decode_speedup": model.speedup(each, size, length),
        }
        for length in sorted({context, *other_contexts})
        for size in sorted({batch, *BATCHES_SHOWN})
        for each in range(1, model.longest + 1)
    ]
    return {
        "context_tokens": context,
        "settings": settings,
        "decode_speedup": model.speedup(drafts, batch, context) if drafts <= model.longest else None,
        "best_num_speculative_tokens": fastest if speedup > 1 else None,
        "break_even_batch_size": model.break_even_batch(context),
    }


def _surface(sweep: Sequence[TimedRound], cost: Callable[[TimedRound], float], terms: Terms) -> Surface:
    measured: Mapping[Sizes, float] = {
        (each.num_speculative_tokens, each.batch_size, each.context_tokens): cost(each) for each in sweep
    }
    return Surface(measured, terms)

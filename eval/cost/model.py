"""The cost model: what speculation gains by number of drafts, batch and context, on this machine or on another one.

Expected seconds are expected rounds (`eval.cost.expected_rounds`) times what a round takes. On this machine that comes from the
timing sweep; for another one the sweep's bytes and operations are divided by its bandwidth and speed, whichever takes longer
(the roofline of Williams et al., CACM 2009), without kernel launches, so that small models look too fast. A batch is taken to
stay full; the row that kept most decides what the draft reads next. R measurements, F terms of a fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
from scipy.optimize import nnls

from eval.cost.expected_rounds import AcceptanceProfile, Floats, expected_rounds
from eval.report.sections import AnswerLength, TimedRound

Sizes = tuple[int, int, int]  # drafts, batch, context
Terms = Callable[[int, float, float], Sequence[float]]

KNEES = (8, 32, 128)  # tokens in a forward from which each further one may cost more
BATCHES_SHOWN = (1, 2, 4, 8, 16, 32, 64)
LARGEST_BATCH = 1024  # tried for the break-even batch


class CostModel:
    """Predicts decode speedups.

    Args:
        costs: of a round.
        profile: the acceptance.
        answers: how long the answers are.
        longest: the most drafts of a round that the costs know.
    """

    def __init__(self, costs: RoundCosts, profile: AcceptanceProfile, answers: Iterable[AnswerLength], longest: int) -> None:
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

    def break_even_batch(self, context: float, largest: int = LARGEST_BATCH) -> int | None:
        """Return the largest batch at which some number of drafts pays: 0 if none does, None if all up to `largest` do.

        Looked for among powers of two, then between the two where it ceases to pay for good.
        """
        sizes = sorted({largest, *(2**power for power in range(largest.bit_length()))})
        paying = [place for place, batch in enumerate(sizes) if self._pays(batch, context)]
        if not paying:
            return 0
        if paying[-1] == len(sizes) - 1:
            return None
        pays, fails = sizes[paying[-1]], sizes[paying[-1] + 1]
        while fails - pays > 1:
            middle = (pays + fails) // 2
            pays, fails = (middle, fails) if self._pays(middle, context) else (pays, middle)
        return pays

    def _pays(self, batch: int, context: float) -> bool:
        return self.best(batch, context)[1] > 1


def summarise_model(
    model: CostModel, drafts: int, batch: int, context: int, other_contexts: Iterable[int], largest: int = LARGEST_BATCH
) -> dict[str, Any]:
    """Return the numbers of the report's `speed.predicted`, for a run that was measured and for settings beside it.

    `largest` is the largest batch that was timed, beyond which nothing is claimed of where drafting ceases to pay.
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
        "break_even_batch_size": model.break_even_batch(context, largest),
    }


class RoundCosts(Protocol):
    """What a round costs."""

    def round_seconds(self, drafts: int, batch: int, context: float, after_full: float) -> float:
        """Return the seconds of a whole round, `after_full` being the chance that the round before kept all drafts."""


class MeasuredCosts:
    """This machine's, from the timing sweep."""

    def __init__(self, sweep: Sequence[TimedRound]) -> None:
        self.verify = _surface(sweep, "verify_seconds", forward_terms)
        self.other = _surface(sweep, "other_seconds", other_terms)
        self.draft = _surface(sweep, "draft_seconds", drafting_terms)
        self.draft_after_full = _surface(sweep, "draft_seconds_after_full", drafting_terms)

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
        self.verify_bytes = _surface(sweep, "verify_bytes", forward_terms)
        self.verify_flops = _surface(sweep, "verify_flops", forward_terms)
        self.draft_bytes = _surface(sweep, "draft_bytes", drafting_terms)
        self.draft_flops = _surface(sweep, "draft_flops", drafting_terms)

    def round_seconds(self, drafts: int, batch: int, context: float, after_full: float) -> float:
        sizes = drafts, batch, context
        seconds = self._longer(self.verify_bytes(*sizes), self.verify_flops(*sizes))
        return seconds + self._longer(self.draft_bytes(*sizes), self.draft_flops(*sizes)) if drafts else seconds

    def _longer(self, num_bytes: float, num_flops: float) -> float:
        return max(num_bytes / self.bytes_per_second, num_flops / self.flops_per_second)


class Surface:
    """A cost by number of drafts, batch and context: measured where it was measured, fitted beyond.

    The fit is a sum of terms that only grow, multiplied by what was measured over what it says, on straight lines between the
    measured sizes and level beyond: on a CPU a forward does not grow smoothly with its tokens.

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
    """Return the factors, none negative, that make the squared relative errors least; measurements of 0 are left out."""
    kept_R = np.asarray(costs_R) > 0
    rows_RF = np.asarray(terms_RF, dtype=np.float64)[kept_R] / np.asarray(costs_R)[kept_R, None]
    scale_F = np.linalg.norm(rows_RF, axis=0)
    scale_F[scale_F == 0] = 1.0
    factors_F: Floats = nnls(rows_RF / scale_F, np.ones(len(rows_RF)))[0] / scale_F if kept_R.any() else np.zeros_like(scale_F)
    return factors_F


def forward_terms(drafts: int, batch: float, context: float) -> list[float]:
    """Return the terms of the target's forward: a floor, its tokens, the keys and values it reads, the attention's products."""
    tokens = batch * (drafts + 1)
    return [1.0, tokens, *(max(0.0, tokens - knee) for knee in KNEES), batch * context, tokens * context]


def drafting_terms(drafts: int, batch: float, context: float) -> list[float]:
    """Return the terms of drafting: once a round and once a draft, each with its floor, its rows and their context."""
    return [1.0, batch, batch * context, drafts, drafts * batch, drafts * max(0.0, batch - KNEES[0]), drafts * batch * context]


def other_terms(drafts: int, batch: float, context: float) -> list[float]:
    """Return the terms of verification and the rest: the floor, and the rows of logits."""
    return [1.0, batch * (drafts + 1)]


def _surface(sweep: Sequence[TimedRound], cost: str, terms: Terms) -> Surface:
    measured: dict[Sizes, float] = {
        (each.num_speculative_tokens, each.batch_size, each.context_tokens): getattr(each, cost)
        for each in sweep
        if each.num_speculative_tokens or terms is not drafting_terms  # plain rounds do not draft
    }
    return Surface(measured, terms)


def _between(values: Mapping[float, float], place: float) -> float:
    places = sorted(values)
    return float(np.interp(place, places, [values[each] for each in places]))

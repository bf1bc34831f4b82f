"""The cost model: what speculation gains by number of drafts, batch and context, on this machine or on another one.

Expected seconds are expected rounds times what a round takes. Rounds follow from the measured chance at each position that a
draft is accepted where those before it were, never from powers of one rate. A round's seconds come from the timing sweep; for
another machine the sweep's bytes and operations are divided by its bandwidth and speed, whichever takes longer (the roofline of
Williams et al., CACM 2009), without kernel launches, so that small models look too fast. A batch is taken to stay full; the row
that kept most decides what the draft reads next. G drafts, A accepted, R measurements, F terms of a fit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from eval.decoder.records import ENDED, Generation
from eval.report.sections import AnswerLength, TimedRound

Floats = NDArray[np.float64]
Sizes = tuple[int, int, int]  # drafts, batch, context
Terms = Callable[[int, float, float], Sequence[float]]

KNEES = (8, 32, 128)  # tokens in a forward from which each further one may cost more
LARGEST_BATCH = 1024  # tried for the break-even batch


# --- rounds -------------------------------------------------------------------------------------------------------


class AcceptanceProfile:
    """How many of a round's drafts are accepted, by the shares accepted of the drafts judged at each position.

    A position that was not measured takes the last one's share. With `by_text_alone` a guess does not depend on where its round
    began, as that of a draft LM; a head's is better nearer to the target's last state.
    """

    def __init__(self, conditional: Sequence[float | None], *, by_text_alone: bool) -> None:
        self.conditional = [share for share in conditional if share is not None]
        self.by_text_alone = by_text_alone
        if not self.conditional:
            raise ValueError("no draft was judged, so that there is no acceptance to predict from")

    def accepted(self, num_drafts: int) -> Floats:
        """Return the chances `[G + 1]` that 0, 1, ... of as many drafts are accepted, over all rounds that draft so many."""
        if self.by_text_alone and num_drafts < len(self.conditional):
            return self._split(num_drafts)
        missing = num_drafts - len(self.conditional)
        chances_G = np.array([*self.conditional, *[self.conditional[-1]] * missing][:num_drafts])
        reached_A = np.concatenate([[1.0], np.cumprod(chances_G)])  # the chance to keep at least so many
        return reached_A * np.append(1 - chances_G, 1.0)

    def _split(self, num_drafts: int) -> Floats:
        """Cover the stretches of text of the measured rounds by shorter rounds, of which easy stretches then fill more.

        A measured round that kept A drafts covers A places where the draft is right and one where it is wrong: shorter rounds
        never reach across the latter. The place behind a round that kept all is unknown; it is taken for right with the
        last position's chance, and a shorter round that reaches over it for as much of a whole one as lies before.
        """
        size, longest = num_drafts + 1, len(self.conditional)
        rounds_A = np.zeros(size)
        for accepted, share in enumerate(self.accepted(longest)):
            whole, rest = divmod(accepted + 1, size)
            rounds_A[num_drafts] += share * whole
            if rest:
                right = self.conditional[-1] if accepted == longest else 0.0
                rounds_A[rest - 1] += share * (1 - right)
                rounds_A[num_drafts] += share * right * rest / size
        split_A: Floats = rounds_A / rounds_A.sum()
        return split_A


def answer_lengths(generations: Iterable[Generation], max_new_tokens: int) -> list[AnswerLength]:
    """Count answers by their length; those without rounds are left out, as they are of every speed."""
    counts = Counter(
        (len(each.tokens) - 1, max_new_tokens - len(each.tokens) if each.stop_reason in ENDED else 0)
        for each in generations
        if len(each.tokens) > 1
    )
    return [AnswerLength(num_tokens=n, room_behind=behind, num_answers=count) for (n, behind), count in sorted(counts.items())]


def expected_rounds(profile: AcceptanceProfile, num_drafts: int, answers: Iterable[AnswerLength]) -> Floats:
    """Return how many rounds with 0, 1, ..., `num_drafts` drafts the answers are expected to take, `[G + 1]`.

    Rounds are assumed independent of each other. The last ones of an answer have less room: drafts behind its end are wasted.
    """
    accepted = [profile.accepted(drafts) for drafts in range(num_drafts + 1)]
    rounds_G = np.zeros(num_drafts + 1)
    for answer in answers:
        begins = np.zeros(answer.num_tokens + 1)  # the chance that a round begins with so many tokens still to come
        begins[-1] = 1.0
        for left in range(answer.num_tokens, 0, -1):
            drafts = min(num_drafts, left - 1 + answer.room_behind)
            rounds_G[drafts] += answer.num_answers * begins[left]
            useful = min(drafts + 1, left - 1)  # outcomes after which something is left
            begins[left - useful : left] += begins[left] * accepted[drafts][:useful][::-1]
    return rounds_G


class CostModel:
    """Predicts decode speedups for up to `longest` drafts, by the costs of rounds, the acceptance and the answers' lengths."""

    def __init__(self, costs: RoundCosts, profile: AcceptanceProfile, answers: Iterable[AnswerLength], longest: int) -> None:
        self.costs, self.profile, self.longest = costs, profile, longest
        answers = list(answers)
        self.num_tokens = sum(answer.num_tokens * answer.num_answers for answer in answers)
        self.rounds: Callable[[int], Floats] = cache(lambda drafts: expected_rounds(profile, drafts, answers))

    def speedup(self, drafts: int, batch: int, context: float) -> float:
        """Return plain decoding's seconds over those with as many drafts a round."""
        plain = self.num_tokens * self.costs.round_seconds(0, batch, context, 0.0)
        # The few shorter rounds at an answer's end follow whole ones.
        after_full = 1 - (1 - float(self.profile.accepted(drafts)[-1])) ** batch
        seconds_G = [self.costs.round_seconds(own, batch, context, after_full) for own in range(drafts + 1)]
        return float(plain / np.dot(self.rounds(drafts), seconds_G))

    def best(self, batch: int, context: float) -> tuple[int, float]:
        """Return the fastest number of drafts, and its speedup, be it below 1."""
        speedups = {drafts: self.speedup(drafts, batch, context) for drafts in range(1, self.longest + 1)}
        drafts = max(speedups, key=lambda each: speedups[each])
        return drafts, speedups[drafts]

    def break_even_batch(self, context: float, largest: int = LARGEST_BATCH) -> int | None:
        """Return the largest batch at which some number of drafts pays: 0 if none does, None if all up to `largest` do."""

        def pays(batch: int) -> bool:
            return self.best(batch, context)[1] > 1

        sizes = sorted({largest, *(2**power for power in range(largest.bit_length()))})
        paying = [place for place, batch in enumerate(sizes) if pays(batch)]
        if not paying:
            return 0
        if paying[-1] == len(sizes) - 1:
            return None
        low, high = sizes[paying[-1]], sizes[paying[-1] + 1]  # it ceases to pay between these powers of two
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if pays(middle) else (low, middle)
        return low


# --- what a round costs -------------------------------------------------------------------------------------------


class MeasuredCosts:
    """The seconds of a round on this machine, from the timing sweep."""

    def __init__(self, sweep: Sequence[TimedRound]) -> None:
        self.verify = _surface(sweep, "verify_seconds", forward_terms)
        self.other = _surface(sweep, "other_seconds", other_terms)
        self.draft = _surface(sweep, "draft_seconds", drafting_terms)
        self.draft_after_full = _surface(sweep, "draft_seconds_after_full", drafting_terms)

    def round_seconds(self, drafts: int, batch: int, context: float, after_full: float) -> float:
        """Return the seconds of a whole round, `after_full` being the chance that the round before kept all drafts."""
        sizes = drafts, batch, context
        seconds = self.verify(*sizes) + self.other(*sizes)
        if drafts:
            seconds += (1 - after_full) * self.draft(*sizes) + after_full * self.draft_after_full(*sizes)
        return seconds


class RooflineCosts:
    """The seconds of a round on another machine, from the sweep's work; FLOP/s are those of matrix products in its dtype."""

    def __init__(self, sweep: Sequence[TimedRound], bytes_per_second: float, flops_per_second: float) -> None:
        self.bytes_per_second, self.flops_per_second = bytes_per_second, flops_per_second
        self.verify_bytes = _surface(sweep, "verify_bytes", forward_terms)
        self.verify_flops = _surface(sweep, "verify_flops", forward_terms)
        self.draft_bytes = _surface(sweep, "draft_bytes", drafting_terms)
        self.draft_flops = _surface(sweep, "draft_flops", drafting_terms)

    def round_seconds(self, drafts: int, batch: int, context: float, after_full: float) -> float:
        """Return the seconds of a whole round; see `MeasuredCosts`."""
        sizes = drafts, batch, context
        seconds = self._longer(self.verify_bytes(*sizes), self.verify_flops(*sizes))
        return seconds + self._longer(self.draft_bytes(*sizes), self.draft_flops(*sizes)) if drafts else seconds

    def _longer(self, num_bytes: float, num_flops: float) -> float:
        return max(num_bytes / self.bytes_per_second, num_flops / self.flops_per_second)


RoundCosts = MeasuredCosts | RooflineCosts


class Surface:
    """A cost by number of drafts, batch and context: measured where it was measured, fitted beyond.

    The fit is a sum of terms that only grow, multiplied by what was measured over what it says, on straight lines between the
    measured sizes and level beyond: on a CPU a forward does not grow smoothly with its tokens. All batches were measured in the
    first context, all contexts in the first batch, for every number of drafts.
    """

    def __init__(self, measured: Mapping[Sizes, float], terms: Terms) -> None:
        self.terms = terms
        self.factors_F = fit_factors([terms(*sizes) for sizes in measured], list(measured.values()))
        fitted = {sizes: self.fit(*sizes) for sizes in measured}
        self._ratios = {
            sizes: cost / fitted[sizes] if fitted[sizes] > 0 and cost > 0 else 1.0 for sizes, cost in measured.items()
        }
        self._first_batch = min(batch for _, batch, _ in measured)
        self._first_context = min(context for _, _, context in measured)

    def fit(self, drafts: int, batch: float, context: float) -> float:
        """Return what the fit alone says."""
        return float(np.dot(self.factors_F, self.terms(drafts, batch, context)))

    def __call__(self, drafts: int, batch: float, context: float) -> float:
        """Return the cost; `drafts` is one of those measured."""
        own = {sizes: ratio for sizes, ratio in self._ratios.items() if sizes[0] == drafts}
        if not own:
            raise ValueError(f"rounds of {drafts} drafts were not measured")
        batches = {math.log(size): ratio for (_, size, other), ratio in own.items() if other == self._first_context}
        contexts = {float(size): ratio for (_, other, size), ratio in own.items() if other == self._first_batch}
        corner = own[drafts, self._first_batch, self._first_context]
        along = _between(batches, math.log(batch)) * _between(contexts, context) / corner
        return self.fit(drafts, batch, context) * along


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

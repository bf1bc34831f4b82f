"""The fit finds what made the costs, never with a negative factor; measured costs come back as they are."""

from itertools import combinations

import numpy as np
import pytest

from eval.cost.model import Surface, drafting_terms, fit_factors, forward_terms

PLACES = [(1, 64), (4, 64), (16, 64), (1, 1024)]
SIZES = [(drafts, *place) for drafts in range(9) for place in PLACES]


def truth(drafts, batch, context):
    """Seconds of a forward with a floor, a slope beyond 32 tokens, and keys and values."""
    tokens = batch * (drafts + 1)
    return 0.02 + 1e-4 * tokens + 5e-4 * max(0, tokens - 32) + 2e-6 * batch * context


def test_the_fit_finds_the_terms_that_made_the_costs_and_tells_those_beyond():
    surface = Surface({sizes: truth(*sizes) for sizes in SIZES}, forward_terms)

    assert surface.factors_F == pytest.approx([0.02, 1e-4, 0, 5e-4, 0, 2e-6, 0], abs=1e-8)
    for sizes in ((3, 64, 64), (8, 256, 4096), (0, 2, 500)):
        assert surface(*sizes) == pytest.approx(truth(*sizes), rel=1e-4)


def test_measured_costs_come_back_although_no_fit_passes_through_them():
    dice = np.random.default_rng(0)
    measured = {sizes: truth(*sizes) * dice.uniform(0.5, 2.0) for sizes in SIZES}
    surface = Surface(measured, forward_terms)

    assert [surface(*sizes) for sizes in SIZES] == pytest.approx(list(measured.values()))
    assert max(abs(surface.fit(*sizes) / cost - 1) for sizes, cost in measured.items()) > 0.2


def test_between_and_beyond_the_fit_is_off_by_as_much_as_at_the_nearest_measurements():
    measured = {sizes: truth(*sizes) * (1.3 if sizes[1] == 16 else 1.0) for sizes in SIZES}
    surface = Surface(measured, forward_terms)
    ratio = {batch: measured[2, batch, 64] / surface.fit(2, batch, 64) for batch in (4, 16)}

    assert surface(2, 8, 64) / surface.fit(2, 8, 64) == pytest.approx((ratio[4] + ratio[16]) / 2)
    assert surface(2, 500, 64) / surface.fit(2, 500, 64) == pytest.approx(ratio[16])


def test_the_factors_are_the_best_of_all_sets_of_free_ones():
    dice = np.random.default_rng(1)
    for _ in range(60):
        terms = dice.uniform(0, 3, (9, 5)) + 2.0  # alike, so that factors taken up early have to be let go
        costs = np.abs(terms @ dice.normal(size=5)) + 0.5
        rows = terms / costs[:, None]
        best = None
        for size in range(1, 6):
            for free in map(list, combinations(range(5), size)):
                solved = np.linalg.lstsq(rows[:, free], np.ones(9), rcond=None)[0]
                loss = ((rows[:, free] @ solved - 1) ** 2).sum()
                if (solved >= 0).all() and (best is None or loss < best[0]):
                    best = loss, free, solved
        expected = np.zeros(5)
        expected[best[1]] = best[2]

        assert fit_factors(terms, costs) == pytest.approx(expected, abs=1e-9)


def test_drafting_in_one_forward_and_step_by_step_are_both_fitted():
    for seconds in (lambda d, b, c: 0.004 + 1e-6 * b * c, lambda d, b, c: d * (0.003 + 1e-4 * b)):
        surface = Surface({sizes: seconds(*sizes) for sizes in SIZES if sizes[0]}, drafting_terms)
        assert surface(5, 40, 64) == pytest.approx(seconds(5, 40, 64), rel=1e-4)


def test_drafts_that_were_not_measured_are_refused():
    surface = Surface({sizes: truth(*sizes) for sizes in SIZES}, forward_terms)

    with pytest.raises(ValueError, match="rounds of 9 drafts were not measured"):
        surface(9, 1, 64)

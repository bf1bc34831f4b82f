"""Minimal detectable effects: by the formula, and found in four of five simulated runs when the effect is real."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval.stats.bootstrap import ratio_interval
from eval.stats.power import detectable_mean, detectable_percent, detectable_variation
from eval.stats.significance import g_test


def made_up(num_prompts, seed, tau=2.0, spread=0.4):
    """Committed tokens and rounds of prompts whose own yields scatter about tau."""
    generator = np.random.default_rng(seed)
    rounds = generator.integers(20, 60, num_prompts).astype(float)
    return rounds * generator.normal(tau, spread, num_prompts), rounds


def test_the_standard_error_is_that_of_the_bootstrap():
    committed, rounds = made_up(200, seed=0)
    tau = committed.sum() / rounds.sum()
    drawn = np.random.default_rng(1).integers(200, size=(4000, 200))
    error = (committed[drawn].sum(1) / rounds[drawn].sum(1)).std() / tau
    # Two-sided 5 % and 80 %: 1.96 + 0.84 standard errors.
    assert detectable_percent([committed], [rounds]) == pytest.approx(100 * 2.816 * error, rel=0.05)


def test_a_mean_is_detectable_from_so_many_of_its_standard_errors():
    values = np.random.default_rng(0).normal(size=400)
    assert detectable_mean(values) == pytest.approx(2.812 * values.std(ddof=1) / 20, rel=1e-2)
    assert detectable_mean(values, level=0.99) == pytest.approx((2.588 + 0.843) * values.std(ddof=1) / 20, rel=1e-2)
    assert detectable_mean([1.0]) is None


def test_an_effect_of_the_detectable_size_is_found_in_four_of_five_runs():
    num_prompts = 16
    known = np.mean([detectable_percent([tokens], [rounds]) for tokens, rounds in (made_up(num_prompts, n) for n in range(50))])
    changed = 2.0 * (1 + known / 100)
    found = 0
    for seed in range(400):
        interval = ratio_interval(*made_up(num_prompts, 1000 + seed, tau=changed), samples=200, seed=seed)
        found += interval.low > 2.0
    assert 0.73 <= found / 400 <= 0.87


@pytest.mark.parametrize(("num_cells", "num_samples"), [(4, 200), (40, 800)])
def test_a_total_variation_of_the_detectable_size_is_found_in_four_of_five_runs_wherever_it_hides_best(num_cells, num_samples):
    generator = np.random.default_rng(0)
    p = np.repeat(generator.dirichlet(np.full(num_cells // 2, 4.0)), 2) / 2
    least = detectable_variation(num_samples, num_cells - 1, level=0.99)
    q = p * (1 + 2 * least * np.tile([1, -1], num_cells // 2))  # as even as can be: all cells move by the same factor
    assert np.abs(p - q).sum() / 2 == pytest.approx(least)
    p_values = [g_test(generator.multinomial(num_samples, q).tolist(), p.tolist()).p_value for _ in range(600)]
    assert 0.74 <= np.mean(np.array(p_values) <= 0.01) <= 0.86
    assert detectable_variation(num_samples, 0) is None


def test_what_two_sides_share_needs_no_prompts():
    committed, rounds = made_up(64, seed=0)
    alone = detectable_percent([committed], [rounds])
    assert detectable_percent([committed, rounds], [rounds, 1.1 * committed]) == pytest.approx(0.0, abs=1e-12)
    other, other_rounds = made_up(64, seed=1)
    assert detectable_percent([committed, other_rounds], [rounds, other]) == pytest.approx(math.sqrt(2) * alone, rel=0.3)


def test_prompts_without_a_round_do_not_count():
    committed, rounds = made_up(20, seed=0)
    padded = np.append(committed, [0.0, 0.0]), np.append(rounds, [0.0, 0.0])
    assert detectable_percent([padded[0]], [padded[1]]) == detectable_percent([committed], [rounds])


@pytest.mark.parametrize("columns", [([], []), ([3.0], [2.0]), ([0.0, 0.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 0.0])])
def test_too_little_to_say_is_none(columns):
    assert detectable_percent([columns[0]], [columns[1]]) is None

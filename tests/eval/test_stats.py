"""Intervals against loops and against the distribution they promise; tests of hypotheses as often wrong as they say; power."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import t as student

from eval.stats import (
    Interval,
    detectable_percent,
    detectable_variation,
    g_test,
    paired_ratio_interval,
    ratio_interval,
    sign_flip_p_value,
    statistic_interval,
)

NUM_SIMULATIONS = 2000


def test_bounds_are_those_of_a_jackknife_by_a_plain_loop():
    columns = np.random.default_rng(1).integers(1, 9, (4, 5)).astype(float)

    def number(sums):
        return sums[0] / sums[1] - sums[2] * sums[3]

    def ratio(sums):
        return sums[0] * sums[1] / (sums[2] * sums[3])

    for statistic, scale, back in ((number, lambda x: x, lambda x: x), (ratio, math.log, math.exp)):
        without = [
            scale(statistic([sum(column[:place]) + sum(column[place + 1 :]) for column in columns])) for place in range(5)
        ]
        error = math.sqrt(4 / 5 * sum((each - sum(without) / 5) ** 2 for each in without))
        point = statistic(columns.sum(axis=1))
        found = statistic_interval(statistic, *columns, is_ratio=statistic is ratio)
        margin = student.ppf(0.975, 4) * error
        assert found.point == pytest.approx(point, rel=1e-12)
        assert found.bounds == pytest.approx([back(scale(point) - margin), back(scale(point) + margin)], rel=1e-9)


def test_a_ratio_that_one_cluster_alone_lifts_above_0_has_an_interval_from_0():
    found = ratio_interval([0, 0, 2, 0], [1, 1, 1, 1])  # without the third 0, without another 2 / 3
    error = math.sqrt(3 / 4 * (0.5**2 + 3 * (2 / 3 - 0.5) ** 2))
    assert (found.point, found.low, found.high) == (0.5, 0.0, pytest.approx(0.5 + student.ppf(0.975, 3) * error))
    assert ratio_interval([0, 0, 0], [1, 1, 1]) == Interval(0.0, 0.0, 0.0)


def test_pairing_cancels_what_both_sides_share():
    generator = np.random.default_rng(0)
    difficulty = generator.lognormal(sigma=1.0, size=64)
    seconds, tokens = 3.0 * difficulty, np.full(64, 10.0)
    paired = paired_ratio_interval(seconds, tokens, difficulty, tokens)
    alone = ratio_interval(seconds, tokens)
    assert paired.bounds == pytest.approx([3.0, 3.0])
    assert alone.high > 1.5 * alone.low


def made_up(num_prompts, seed, tau=2.0, spread=0.4):
    """Committed tokens and rounds of prompts whose own yields scatter about tau."""
    generator = np.random.default_rng(seed)
    rounds = generator.integers(20, 60, num_prompts).astype(float)
    return rounds * generator.normal(tau, spread, num_prompts), rounds


@pytest.mark.parametrize("spread", [0.1, 0.25])
@pytest.mark.parametrize("num_clusters", [3, 4, 8, 16])
def test_intervals_of_tau_hold_the_truth_as_often_as_they_say(num_clusters, spread):
    """The clusters' own taus scatter about 2 by `spread` of it. A gate that asks for the truth passes half of the misses."""
    found = [ratio_interval(*made_up(num_clusters, seed, spread=2.0 * spread)) for seed in range(NUM_SIMULATIONS)]
    assert 0.93 <= np.mean([each.low <= 2.0 <= each.high for each in found]) <= 0.97
    assert np.mean([each.low > 2.0 for each in found]) <= 0.05


@pytest.mark.parametrize("num_batches", [3, 8])
def test_intervals_of_a_speedup_hold_the_truth_as_often_as_they_say(num_batches):
    """Batches differ in length and in how fast either way decodes them; a busy machine slows both at once. The truth is 1.5."""
    generator, held = np.random.default_rng(108), 0
    for _ in range(NUM_SIMULATIONS):
        tokens = generator.integers(20, 120, num_batches)
        busy = generator.uniform(1.0, 2.0, num_batches)
        plain = 0.03 * tokens * busy * generator.normal(1.0, 0.05, num_batches)
        speculative = 0.02 * tokens * busy * generator.normal(1.0, 0.2, num_batches)
        interval = paired_ratio_interval(plain, tokens, speculative, tokens)
        held += interval.low <= 1.5 <= interval.high
    assert 0.93 <= held / NUM_SIMULATIONS <= 0.97


def test_too_few_clusters_give_a_point_without_an_interval_or_nothing():
    assert ratio_interval([3, 3, 0], [2, 2, 0]) == Interval(1.5)  # where nothing happened is no cluster
    assert ratio_interval([], []) == ratio_interval([0, 0], [0, 0]) == Interval(None)
    assert Interval(None).bounds is None
    with pytest.raises(ValueError, match="finite"):
        ratio_interval([float("nan"), 1.0], [1.0, 1.0])


def test_g_is_twice_the_log_likelihood_ratio_over_williams_correction():
    counts, probabilities = [30, 50, 20, 0], [0.25, 0.5, 0.15, 0.1]
    expected = [100 * probability for probability in probabilities]
    plain = 2 * sum(count * math.log(count / mean) for count, mean in zip(counts, expected, strict=True) if count)
    correction = 1 + (sum(1 / probability for probability in probabilities) - 1) / (6 * 100 * 3)
    found = g_test(counts, probabilities)
    assert (found.statistic, found.degrees_of_freedom) == (pytest.approx(plain / correction), 3)
    assert g_test([25, 50, 25], [0.25, 0.5, 0.25]) == (0.0, 2, 1.0)
    assert g_test([256], [1.0]).p_value is g_test([0, 0], [0.5, 0.5]).p_value is None


def test_g_raises_false_alarms_as_often_as_its_level_where_cells_expect_five_samples():
    generator, level = np.random.default_rng(0), 0.05
    probabilities = np.array([5 / 256] * 20 + [0.1] * 3)
    probabilities = np.append(probabilities, 1 - probabilities.sum())
    counts = generator.multinomial(256, probabilities, size=4000)
    alarms = np.mean([g_test(row, probabilities).p_value <= level for row in counts])
    assert alarms == pytest.approx(level, abs=4 * math.sqrt(level / 4000))


def test_a_sign_flip_test_counts_the_signs_that_sum_to_as_much():
    """1, 2, 4 and a zero: of eight sets of signs, 7 = 1 + 2 + 4 is one; 5 = 4 + 2 - 1 is the second of them."""
    assert sign_flip_p_value([1, 2, 0, 4]) == 1 / 8
    assert sign_flip_p_value([-1, 2, 4]) == 2 / 8
    assert sign_flip_p_value([]) == sign_flip_p_value([0, 0]) == sign_flip_p_value([-1]) == 1
    many = np.random.default_rng(0).normal(0.5, 1, 14)
    exact = np.mean([np.dot(signs, many) >= many.sum() - 1e-9 for signs in itertools.product((1, -1), repeat=14)])
    assert sign_flip_p_value(many) == pytest.approx(exact, rel=0.2)


# --- detectable effects -------------------------------------------------------------------------------------------


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


def test_what_is_detectable_is_what_the_weight_of_each_prompt_moves():
    """By weights w, log(sum_i w_i c_i / sum_i w_i r_i) has slopes c_i / C - r_i / R."""
    generator, num_prompts = np.random.default_rng(3), 9
    above, below = generator.integers(1, 50, (2, num_prompts)).astype(float)
    moves = above / sum(above) - below / sum(below)
    variance = sum(move**2 for move in moves) * num_prompts / (num_prompts - 1)
    errors = student.ppf(0.975, num_prompts - 1) + student.ppf(0.8, num_prompts - 1)
    assert detectable_percent(above, below) == pytest.approx(100 * errors * math.sqrt(variance), rel=1e-12)


@pytest.mark.parametrize("columns", [([], []), ([3.0], [2.0]), ([0.0, 0.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 0.0])])
def test_too_little_to_say_is_none(columns):
    assert detectable_percent(*columns) is None

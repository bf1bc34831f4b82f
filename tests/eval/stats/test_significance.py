"""The tests of hypotheses: against printed tables and plain loops, and as often wrong as they say, no oftener."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from eval.stats.significance import chi_square_tail, g_test, holm, sign_flip_test


def test_g_is_twice_the_log_likelihood_ratio_over_williams_correction():
    counts, probabilities = [30, 50, 20, 0], [0.25, 0.5, 0.15, 0.1]
    expected = [100 * probability for probability in probabilities]
    plain = 2 * sum(count * math.log(count / mean) for count, mean in zip(counts, expected, strict=True) if count)
    correction = 1 + (sum(1 / probability for probability in probabilities) - 1) / (6 * 100 * 3)

    found = g_test(counts, probabilities)

    assert found.statistic == pytest.approx(plain / correction)
    assert type(found.statistic) is float
    assert (found.degrees_of_freedom, found.p_value) == (3, chi_square_tail(found.statistic, 3))


def test_counts_just_as_expected_are_no_surprise_at_all():
    found = g_test([25, 50, 25], [0.25, 0.5, 0.25])
    assert (found.statistic, found.p_value) == (0.0, 1.0)


@pytest.mark.parametrize(("counts", "probabilities"), [([256], [1.0]), ([0, 0], [0.5, 0.5])])
def test_one_cell_or_no_sample_is_no_test(counts, probabilities):
    assert g_test(counts, probabilities).p_value is None


@pytest.mark.parametrize(("counts", "probabilities"), [([1, 2], [1.0, 0.0]), ([1, 2], [0.4, 0.4])])
def test_what_is_no_distribution_over_the_cells_is_refused(counts, probabilities):
    with pytest.raises(ValueError, match="probabilit"):
        g_test(counts, probabilities)


def test_g_raises_false_alarms_as_often_as_its_level_where_cells_expect_five_samples():
    generator, level = np.random.default_rng(0), 0.05
    probabilities = np.array([5 / 256] * 20 + [0.1] * 3)
    probabilities = np.append(probabilities, 1 - probabilities.sum())
    counts = generator.multinomial(256, probabilities, size=4000)

    alarms = np.mean([g_test(row, probabilities).p_value <= level for row in counts])

    assert alarms == pytest.approx(level, abs=4 * math.sqrt(level / 4000))


def test_signs_are_tried_as_by_a_loop_over_all_of_them():
    differences = [0.9, -0.2, 0.4, 0.7, -0.1, 0.3, 0.5, 0.8, -0.3, 0.6]
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product((-1, 1), repeat=10)]
    exact = np.mean([value >= abs(sum(differences)) - 1e-9 for value in sums])

    assert sign_flip_test(differences, seed=0) == pytest.approx(exact)
    assert sign_flip_test(differences, seed=0, flips=999) == pytest.approx(exact, abs=4 * math.sqrt(exact / 999))


def test_differences_that_are_all_zero_are_no_surprise():
    assert sign_flip_test(np.zeros(20), seed=0) == 1.0


def test_a_shift_of_every_difference_is_found_whatever_its_sign():
    differences = np.random.default_rng(0).normal(1.0, 1.0, 40)
    assert sign_flip_test(differences, seed=0) == sign_flip_test(-differences, seed=0) == 2e-4


@pytest.mark.parametrize("draw", ["normal", "exponential"])
def test_sign_flips_raise_false_alarms_as_often_as_the_level(draw):
    generator = np.random.default_rng(0)
    samples = generator.normal(size=(1000, 24)) if draw == "normal" else generator.exponential(size=(1000, 24)) - 1.0
    alarms = np.mean([sign_flip_test(row, seed=number, flips=399) <= 0.05 for number, row in enumerate(samples)])
    # A skewed distribution, of which a difference of two samples never is, costs a little.
    assert alarms == pytest.approx(0.05 if draw == "normal" else 0.06, abs=0.025)


def test_holm_multiplies_the_smallest_by_the_number_of_tests_and_never_reorders():
    adjusted = holm({"a": 0.03, "b": 0.001, "c": 0.02, "d": 0.9})
    assert adjusted == pytest.approx({"a": 0.06, "b": 0.004, "c": 0.06, "d": 0.9})
    assert list(adjusted) == ["a", "b", "c", "d"]
    assert holm({"a": 0.7, "b": 0.6}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}

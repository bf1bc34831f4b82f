"""The bootstrap: against loops, against the distribution it promises, and where there is too little to say anything."""

import numpy as np
import pytest

from eval.stats import bootstrap as intervals
from eval.stats.bootstrap import Interval, paired_ratio_interval, ratio_interval

FAST = {"samples": 400, "seed": 0}


def test_bounds_are_the_percentiles_of_pooled_ratios_drawn_by_a_plain_loop(monkeypatch):
    monkeypatch.setattr(intervals, "student_quantile", lambda _, degrees: 1.959964 * np.sqrt(degrees / (degrees + 1)))
    numerators, denominators = [3.0, 9.0, 4.0, 8.0, 6.0], [2.0, 3.0, 3.0, 4.0, 2.0]
    interval = ratio_interval(numerators, denominators, samples=50, seed=7)
    drawn = np.random.default_rng(7).integers(5, size=(50, 5))
    ratios = [sum(numerators[i] for i in row) / sum(denominators[i] for i in row) for row in drawn]
    assert interval.point == 30 / 14
    assert interval.bounds == pytest.approx(np.quantile(ratios, [0.025, 0.975]), rel=1e-6)


def test_pairing_cancels_what_both_sides_share():
    generator = np.random.default_rng(0)
    difficulty = generator.lognormal(sigma=1.0, size=64)
    seconds, tokens = 3.0 * difficulty, np.full(64, 10.0)
    paired = paired_ratio_interval(seconds, tokens, difficulty, tokens, **FAST)
    alone = ratio_interval(seconds, tokens, **FAST)
    assert paired.bounds == pytest.approx([3.0, 3.0])
    assert alone.high > 1.5 * alone.low


def test_intervals_of_a_speedup_hold_the_truth_as_often_as_they_say():
    """Batches differ in length and in how fast either way decodes them; a busy machine slows both at once. The truth is 1.5."""
    generator, num_batches, held = np.random.default_rng(108), 8, 0
    for simulation in range(1000):
        tokens = generator.integers(20, 120, num_batches)
        busy = generator.uniform(1.0, 2.0, num_batches)
        plain = 0.03 * tokens * busy * generator.normal(1.0, 0.05, num_batches)
        speculative = 0.02 * tokens * busy * generator.normal(1.0, 0.2, num_batches)
        interval = paired_ratio_interval(plain, tokens, speculative, tokens, samples=400, seed=simulation)
        held += interval.low <= 1.5 <= interval.high
    assert 930 <= held <= 970


def test_too_few_clusters_give_a_point_without_an_interval_or_nothing():
    assert ratio_interval([3, 0, 0], [2, 0, 0], **FAST) == Interval(1.5)  # where nothing happened is no cluster
    assert ratio_interval([], [], **FAST) == ratio_interval([0, 0], [0, 0], **FAST) == Interval(None)
    assert Interval(None).bounds is None


def test_times_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="finite"):
        ratio_interval([float("nan"), 1.0], [1.0, 1.0], **FAST)

"""Two drafts prompt by prompt: regressions are found or left open, and intervals hold the truth."""

from __future__ import annotations

import numpy as np
import pytest

from eval.stats import bootstrap
from eval.stats.change import Side, compare_sides

FAST = {"samples": 300, "seed": 0}


def two_drafts(num_prompts, seed, change):
    """Counts of two drafts on the same prompts: what a prompt yields is shared, and each draft scatters by itself.

    Returns both sides of tau, the first `change` times as good as the second.
    """
    generator = np.random.default_rng(seed)
    shared = generator.normal(2.2, 0.4, num_prompts)
    sides = []
    for factor in (change, 1.0):
        rounds = generator.integers(30, 60, num_prompts).astype(float)
        committed = rounds * factor * shared * generator.normal(1.0, 0.08, num_prompts)
        sides.append(Side(above=(committed,), below=(rounds,)))
    return sides


def test_a_small_change_is_found_with_enough_prompts_and_left_open_with_too_few():
    enough = [compare_sides(*two_drafts(400, seed, 0.97), **FAST).outcome for seed in range(20)]
    too_few = [compare_sides(*two_drafts(12, seed, 0.97), **FAST).outcome for seed in range(20)]
    assert enough.count("worse") == 20
    assert too_few.count("inconclusive") >= 12
    assert too_few.count("better") <= 1
    assert compare_sides(*two_drafts(400, 0, 1.03), **FAST).outcome == "better"
    enough, too_few = (compare_sides(*two_drafts(num_prompts, 0, 0.97), **FAST) for num_prompts in (400, 12))
    assert enough.detectable_percent < 3.0 < too_few.detectable_percent


def test_numbers_are_those_of_a_plain_loop_that_draws_both_sides_together(monkeypatch):
    monkeypatch.setattr(bootstrap, "student_quantile", lambda _, degrees: 1.959964 * np.sqrt(degrees / (degrees + 1)))
    columns = np.random.default_rng(1).integers(1, 9, (2, 4, 5)).astype(float)  # sides, two above and two below, clusters
    ours, theirs = (Side(above=tuple(side[:2]), below=tuple(side[2:])) for side in columns)
    change = compare_sides(ours, theirs, samples=50, seed=7)

    def number(side, clusters):
        a, b, c, d = (sum(column[cluster] for cluster in clusters) for column in side)
        return a * b / (c * d)

    own, their = (number(side, range(5)) for side in columns)
    assert (change.ours, change.theirs, change.num_clusters) == (pytest.approx(own), pytest.approx(their), 5)
    assert change.ratio == pytest.approx(own / their)
    drawn = np.random.default_rng(7).integers(5, size=(50, 5))
    ratios = [number(columns[0], row) / number(columns[1], row) for row in drawn]
    assert change.ratio_ci == pytest.approx(np.quantile(ratios, [0.025, 0.975]), rel=1e-6)


def test_nothing_to_divide_by_is_none():
    nothing = Side(above=([0.0],), below=([0.0],))
    assert compare_sides(nothing, Side(above=([1.0],), below=([1.0],)), **FAST) is None

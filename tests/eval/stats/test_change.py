"""Two drafts prompt by prompt: regressions are found or left open, and intervals hold the truth."""

from __future__ import annotations

import numpy as np

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


def test_numbers_are_those_of_a_plain_loop():
    ours, theirs = Side(above=([6.0, 9.0],), below=([2.0, 4.0],)), Side(above=([4.0, 6.0],), below=([2.0, 3.0],))
    change = compare_sides(ours, theirs, **FAST)
    assert (change.ours, change.theirs) == (2.5, 2.0)
    assert (change.ratio, change.num_clusters) == (1.25, 2)
    drawn = np.random.default_rng(0).integers(2, size=(300, 2))
    ratios = [np.sum(np.array([6, 9])[row]) / np.sum(np.array([2, 4])[row]) / 2.0 for row in drawn]
    assert min(ratios) <= change.ratio_ci[0] <= change.ratio_ci[1] <= max(ratios)


def test_nothing_to_divide_by_is_none():
    nothing = Side(above=([0.0],), below=([0.0],))
    assert compare_sides(nothing, Side(above=([1.0],), below=([1.0],)), **FAST) is None

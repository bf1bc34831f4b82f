"""Two reports prompt by prompt: regressions are found or left open, intervals hold the truth, nothing is dropped unsaid."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from configs.runtime.errors import InputError
from eval.report.schema import check_report
from eval.stats.paired import Side, compare_reports, compare_sides

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


def rounded(report, change):
    """The report of a draft that committed `change` times as many tokens in as many rounds."""
    other = copy.deepcopy(report)
    for counts in other["acceptance"]["per_prompt"].values():
        counts[0] = round(counts[0] * change)
    return other


# --- what is found ------------------------------------------------------------------------------------------------


def test_a_regression_of_three_percent_is_found_with_enough_prompts_and_left_open_with_too_few():
    enough = [compare_sides(*two_drafts(400, seed, 0.97), **FAST).outcome for seed in range(20)]
    too_few = [compare_sides(*two_drafts(12, seed, 0.97), **FAST).outcome for seed in range(20)]
    assert enough.count("worse") == 20
    assert too_few.count("inconclusive") >= 12
    assert too_few.count("better") <= 1


def test_an_improvement_of_three_percent_is_found_too():
    assert compare_sides(*two_drafts(400, 0, 1.03), **FAST).outcome == "better"


def test_the_detectable_effect_says_which_of_the_two_was_possible():
    enough, too_few = (compare_sides(*two_drafts(num_prompts, 0, 0.97), **FAST) for num_prompts in (400, 12))
    assert enough.detectable_percent < 3.0 < too_few.detectable_percent


def test_equal_drafts_are_called_different_no_oftener_than_the_level_says():
    outcomes = [compare_sides(*two_drafts(40, seed, 1.0), **FAST).outcome for seed in range(400)]
    assert 0.02 <= 1 - outcomes.count("inconclusive") / 400 <= 0.085


@pytest.mark.parametrize("num_prompts", [12, 64])
def test_95_percent_intervals_of_ratio_and_difference_hold_the_truth_about_95_percent_of_the_time(num_prompts):
    held = np.zeros(2)
    for seed in range(1000):
        change = compare_sides(*two_drafts(num_prompts, seed, 0.97), samples=200, seed=seed)
        held[0] += change.ratio_ci[0] <= 0.97 <= change.ratio_ci[1]
        held[1] += change.difference_ci[0] <= -0.03 * 2.2 <= change.difference_ci[1]
    assert (held >= 930).all(), held
    assert (held <= 970).all(), held


def test_numbers_are_those_of_a_plain_loop():
    ours, theirs = Side(above=([6.0, 9.0],), below=([2.0, 4.0],)), Side(above=([4.0, 6.0],), below=([2.0, 3.0],))
    change = compare_sides(ours, theirs, **FAST)
    assert (change.ours, change.theirs) == (2.5, 2.0)
    assert (change.ratio, change.difference, change.num_clusters) == (1.25, 0.5, 2)
    drawn = np.random.default_rng(0).integers(2, size=(300, 2))
    ratios = [np.sum(np.array([6, 9])[row]) / np.sum(np.array([2, 4])[row]) / 2.0 for row in drawn]
    assert min(ratios) <= change.ratio_ci[0] <= change.ratio_ci[1] <= max(ratios)


def test_nothing_to_divide_by_is_none():
    nothing = Side(above=([0.0],), below=([0.0],))
    assert compare_sides(nothing, Side(above=([1.0],), below=([1.0],)), **FAST) is None


# --- reports ------------------------------------------------------------------------------------------------------


def test_a_report_against_itself_shows_no_change(report):
    found = compare_reports(report, report)
    tau, speed = found.tokens_per_target_step, found.decode_speedup
    assert tau.ours == tau.theirs == report["acceptance"]["tokens_per_target_step"]
    assert speed.ours == pytest.approx(report["speed"]["decode_speedup"])
    for change in (tau, speed):
        assert (change.ratio_ci, change.difference_ci, change.outcome) == ((1.0, 1.0), (0.0, 0.0), "inconclusive")
        assert change.detectable_percent == pytest.approx(0.0, abs=1e-9)
    assert (found.num_prompts, found.only_ours, found.only_theirs, found.batches_left_out) == (32, (), (), 0)


def test_a_draft_that_lost_is_worse_on_every_reading(report):
    found = compare_reports(rounded(report, 0.9), report).tokens_per_target_step
    assert found.outcome == "worse"
    assert found.ratio == pytest.approx(0.9, abs=0.01)
    assert found.difference_ci[1] < 0


def test_speed_is_compared_by_each_runs_own_plain_decoding(report):
    slower_machine = copy.deepcopy(report)
    for batch in slower_machine["speed"]["per_batch"]:
        batch["autoregressive"][0] *= 3.0
        batch["speculative"][0] *= 3.0
    assert compare_reports(slower_machine, report).decode_speedup.ratio_ci == pytest.approx((1.0, 1.0))
    slower_draft = copy.deepcopy(report)
    for batch in slower_draft["speed"]["per_batch"]:
        batch["speculative"][0] *= 1.25
    found = compare_reports(slower_draft, report).decode_speedup
    assert (found.ratio, found.outcome) == (pytest.approx(0.8), "worse")


def test_unequal_prompts_are_refused_or_listed(report):
    other = copy.deepcopy(report)
    dropped = list(report["acceptance"]["per_prompt"])[:5]
    for prompt_id in dropped:
        del other["acceptance"]["per_prompt"][prompt_id]
    with pytest.raises(InputError, match=rf"27 prompts are in both, 5 only in the first \({dropped[0]}, .*, \.\.\.\)"):
        compare_reports(report, other)
    with pytest.raises(InputError, match="5 only in the second"):
        compare_reports(other, report)

    found = compare_reports(report, other, allow_unequal=True)

    assert (found.num_prompts, found.only_ours, found.only_theirs) == (27, tuple(dropped), ())
    kept = {key: value for key, value in report["acceptance"]["per_prompt"].items() if key not in dropped}
    tau = sum(counts[0] for counts in kept.values()) / sum(counts[1] for counts in kept.values())
    assert found.tokens_per_target_step.ours == pytest.approx(tau)


def test_prompts_of_other_files_are_refused_even_if_they_have_the_same_names(report):
    other = copy.deepcopy(report)
    other["prompts"]["sha256"] = "f" * 64
    with pytest.raises(InputError, match="which differ"):
        compare_reports(report, other, allow_unequal=True)


def test_no_common_prompt_is_refused_also_where_unequal_ones_are_allowed(report):
    other = copy.deepcopy(report)
    other["acceptance"]["per_prompt"] = {"else": [4, 2]}
    with pytest.raises(InputError, match="0 prompts are in both"):
        compare_reports(report, other, allow_unequal=True)


def test_batches_put_together_otherwise_are_counted_as_left_out(report):
    other = copy.deepcopy(report)
    first, second, *rest = other["speed"]["per_batch"]
    joined = {key: [one + two for one, two in zip(first[key], second[key], strict=True)] for key in first}
    other["speed"]["per_batch"] = [joined, *rest]
    found = compare_reports(report, other)
    assert (found.batches_left_out, found.decode_speedup.num_clusters) == (3, 30)


@pytest.mark.parametrize("speed", ["unmeasured", "older"])
def test_speed_that_is_not_in_both_is_none(report, speed):
    other = copy.deepcopy(report)
    if speed == "unmeasured":
        other["speed"] = None
    else:
        del other["speed"]["per_batch"]
    check_report(other, "the other")
    found = compare_reports(report, other)
    assert found.decode_speedup is None
    assert found.tokens_per_target_step is not None

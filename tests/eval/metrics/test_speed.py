"""The draft against another way of decoding: paired by prompt, equal to the unpaired numbers, tighter than their bounds."""

import pytest

from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE
from eval.metrics.speed import summarise_advantage


def test_against_plain_decoding_it_is_tau_and_the_speedup_themselves(report):
    plain = report.baselines["autoregressive"]

    for name, section, number in (
        ("tokens_per_target_step_ratio", report.acceptance, "tokens_per_target_step"),
        ("decode_speed_ratio", report.speed, "decode_speedup"),
    ):
        for found, expected in zip(plain.interval_of(name), section.interval_of(number), strict=True):
            assert found == pytest.approx(expected)


def test_against_another_baseline_the_ratio_is_that_of_the_two_numbers(report):
    lookup = report.baselines["prompt_lookup"]

    assert lookup.tokens_per_target_step_ratio == pytest.approx(
        report.acceptance.tokens_per_target_step / lookup.tokens_per_target_step
    )
    assert lookup.decode_speed_ratio == pytest.approx(report.speed.decode_speedup / lookup.decode_speedup)


def test_prompts_that_are_easy_for_both_cancel(make_timing):
    # One prompt of six tokens a step with the draft and three without, one of two and one: always twice as many.
    ours, theirs = {"0": [48, 8], "1": [16, 8]}, {"1": [8, 8], "0": [24, 8]}
    timings = [
        make_timing(mode, (str(prompt),), seconds * (1 + prompt), 40)
        for mode, seconds in ((SPECULATIVE, 1.0), ("other", 2.0))
        for prompt in range(2)
    ]

    found = summarise_advantage(ours, theirs, timings, "other", samples=200, seed=0)

    assert found["tokens_per_target_step_ratio_ci"] == [2.0, 2.0]
    assert found["decode_speed_ratio_ci"] == [2.0, 2.0]


def test_a_prompt_that_one_of_them_lacks_is_on_neither_side():
    found = summarise_advantage({"a": [16, 4], "b": [4, 4]}, {"a": [8, 4]}, [], "other", samples=50, seed=0)

    assert found["tokens_per_target_step_ratio"] == 2.0
    assert found["decode_speed_ratio"] is None


def test_repeats_of_a_batch_are_one_cluster(make_timing):
    timings = [make_timing(mode, ("a",), 1.0, 10, repeat=repeat) for mode in (SPECULATIVE, AUTOREGRESSIVE) for repeat in (0, 1)]

    found = summarise_advantage({}, {}, timings, AUTOREGRESSIVE, samples=50, seed=0)

    assert (found["decode_speed_ratio"], found["decode_speed_ratio_ci"]) == (1.0, None)


def test_a_later_turn_is_of_the_batch_that_it_goes_on_with(make_timing):
    batches = [("a", "b"), ("b",)]
    timings = [make_timing(mode, batch, 1.0, 10) for mode in (SPECULATIVE, AUTOREGRESSIVE) for batch in batches]

    found = summarise_advantage({}, {}, timings, AUTOREGRESSIVE, samples=50, seed=0)

    assert (found["decode_speed_ratio"], found["decode_speed_ratio_ci"]) == (1.0, None)  # one cluster says nothing of chance

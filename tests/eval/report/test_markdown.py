"""The Markdown summary: the headline tells the truth in either direction, and outside text breaks nothing."""

import pytest

from eval.report.tables import render_markdown
from eval.report.text import headline, lossless_detail
from tests.support.reports import changed


@pytest.mark.parametrize(
    ("point", "low", "high", "words"),
    [
        (1.42, 1.31, 1.53, ["1.42× [1.31, 1.53]", "lean forward;", "; 1 of 32 answers"]),
        (0.80, 0.75, 0.86, ["0.80× [0.75, 0.86]", "(slower);"]),
        (1.02, 0.97, 1.08, ["(not significant);"]),
        (1.42, None, None, ["1.42×", "without an interval;"]),
    ],
)
def test_the_headline_says_faster_slower_or_neither_as_the_interval_does_and_by_which_forward(report, point, low, high, words):
    bounds = None if low is None else [low, high]
    report = changed(report, {"speed": {"decode_speedup": point, "decode_speedup_ci": bounds}, "decode": {"forward": "lean"}})
    assert all(each in headline(report) for each in words)


@pytest.mark.parametrize(
    ("ratio", "bounds", "words"), [(0.8, [0.7, 0.9], "slower than"), (0.95, [0.8, 1.1], "not sig"), (1.2, [1.1, 1.3], "")]
)
def test_a_way_without_training_that_is_no_slower_is_in_the_headline(report, ratio, bounds, words):
    rival = {"decode_speedup": 1.44, "decode_speed_ratio": ratio, "decode_speed_ratio_ci": bounds}
    said = headline(changed(report, {"baselines.prompt_lookup": rival}))
    assert (words in said, "prompt lookup" in said) == (True, bool(words))


def test_what_a_token_takes_is_said_in_milliseconds_beside_generates(report):
    speed = {"milliseconds_per_token_autoregressive": 20.0, "milliseconds_per_token_speculative": 10.0}
    peer = {"num_prompts": 4, "milliseconds_per_token_generate": 18.0, "milliseconds_per_token_autoregressive": 21.0}
    text = render_markdown(changed(report, {"speed": speed | {"generate": peer}}))
    assert all(each in text for each in ("20.0 ms", "10.0 ms", "18.0 ms in transformers", "21.0 ms"))


def test_warnings_are_said_first_and_without_speed_and_intervals_it_still_reads(report):
    bare = {"warnings": ["The target's template differs."], "speed": None, "acceptance.tokens_per_target_step_ci": None}
    text = render_markdown(changed(report, bare))
    assert "template differs" in text.split("\n\n")[1]
    assert "None" not in text


@pytest.mark.parametrize(
    ("verdict", "num_differing", "wrong", "words"),
    [
        ("lossless", 0, 0, ["3,412 tokens", "none of 32"]),
        ("lossless_up_to_ties", 2, 0, ["3,412 tokens", "2 of 32", "tie"]),
        ("not_lossless", 2, 5, ["5 tokens are not", "2 of 32"]),
    ],
)
def test_a_greedy_headline_counts_tokens_and_differing_answers(report, verdict, num_differing, wrong, words):
    section = {
        "verdict": verdict,
        "checked_tokens": 3412,
        "tolerance": 0.58,
        "largest_gap": 0.113,
        "divergences": [report.lossless.divergences[0].model_dump()] * num_differing,
        "checks": {"greedy": {"wrong_tokens": wrong, "wrong_ends": 0}},
    }
    report = changed(report, {"lossless": section})
    assert all(each in headline(report) for each in words)
    assert all(each in lossless_detail(report) for each in (*words, "0.11", "0.58"))


def test_the_test_of_samples_is_named_with_its_p_value_and_what_it_lacks(report):
    test = {"p_value": 0.4, "num_samples": 512, "detectable_difference": 0.12}

    def sampled(verdict, **lossless):
        checks = {"checks": {"first_tokens": test}} | lossless
        return changed(report, {"decode.temperature": 1.0, "lossless": {"verdict": verdict} | checks})

    assert "512 samples, p = 0.4" in headline(sampled("lossless"))
    assert "0.12" in lossless_detail(sampled("lossless"))
    assert "first tokens (p = 0.4)" in headline(sampled("not_lossless", failed_checks=["first_tokens"]))
    lacking = {"checks": {"first_tokens": {"p_value": None, "reason": "samples_failed"}}}
    assert "first tokens (samples failed)" in headline(sampled("inconclusive", inconclusive_checks=["first_tokens"], **lacking))

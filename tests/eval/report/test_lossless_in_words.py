"""A losslessness check is named, with its grounds, wherever a person reads the verdict."""

from __future__ import annotations

import pytest

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import GateConfig, LosslessConfig
from eval.lossless.verdict import judge_lossless
from eval.release.checks import judge
from eval.report.text import headline, lossless_detail
from tests.support.reports import changed

ALL_RIGHT = "every one of 3,412 tokens is the target's choice within rounding; "


@pytest.mark.parametrize(
    ("verdict", "num_differing", "wrong", "words"),
    [
        ("lossless", 0, 0, f"{ALL_RIGHT}none of 32 answers differs from plain decoding's"),
        (
            "lossless_up_to_ties",
            2,
            0,
            f"{ALL_RIGHT}2 of 32 answers differ from plain decoding's, first where two tokens nearly tie",
        ),
        ("not_lossless", 2, 5, "5 tokens are not the target's choice; 2 of 32 answers differ from plain decoding's"),
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
    assert f"; {words}." in headline(report)
    detail = f"{words}; a token lies up to 0.11 below the largest logit, and rounding explains "
    assert lossless_detail(report).startswith(detail)


def test_tests_of_samples_are_named_with_their_p_values_and_what_they_lack(report):
    tests = {
        "first_tokens": {"adjusted_p_value": 0.4, "num_samples": 512, "detectable_difference": 0.12},
        "likelihood": {"adjusted_p_value": 0.31, "num_answers": 32},
    }

    def sampled(verdict, **lossless):
        return changed(report, {"decode.temperature": 1.0, "lossless": {"verdict": verdict, "checks": tests} | lossless})

    assert "(first tokens of 512 samples, p = 0.4; likelihood of 32 answers, p = 0.31)." in headline(sampled("lossless"))
    assert lossless_detail(sampled("lossless")).endswith("; a total variation of 0.12 would show in four of five runs")
    assert "first tokens (p = 0.4)" in headline(sampled("not_lossless", failed_checks=["first_tokens"]))
    tests["likelihood"] = {"adjusted_p_value": None, "reason": "too_few_prompts"}
    findings = judge(sampled("inconclusive", inconclusive_checks=["likelihood"]), GateConfig()).findings
    (found,) = (each for each in findings if each.check == "lossless")
    assert (found.outcome, found.reason.endswith(": likelihood (too few prompts)")) == ("inconclusive", True)


def test_where_no_test_of_samples_was_run_headline_and_gate_name_the_setting_that_says_so(tiny_llama, as_target, report):
    """The section is the one that an evaluation at a temperature writes with `lossless.false_alarm_rate` null."""
    sampled = DecodeConfig(temperature=1.0)
    section = judge_lossless(as_target(tiny_llama()), [], [], sampled, LosslessConfig(false_alarm_rate=None), None)
    untested = changed(report, {"decode.temperature": 1.0, "lossless": section})
    sentence = "no test of samples was run (lossless.false_alarm_rate was null)"
    assert headline(untested).endswith(f"; not decided whether the output is the target's: {sentence}.")
    (found,) = (each for each in judge(untested, GateConfig()).findings if each.check == "lossless")
    assert (found.outcome, found.reason) == ("inconclusive", f"{sentence}: evaluate with that as it is by default")

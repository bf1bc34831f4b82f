"""A losslessness check is named, with its grounds, wherever a person reads the verdict."""

from __future__ import annotations

import pytest

from configs.schema.evaluation import GateConfig
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

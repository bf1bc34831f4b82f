"""A losslessness check that failed or stayed open is named, with its grounds, wherever a person reads the verdict."""

from __future__ import annotations

import pytest

from configs.schema.evaluation import GateConfig
from eval.release.checks import judge
from eval.report.text import headline, lossless_detail
from tests.support.reports import changed


def sampled(report, verdict, failed=(), inconclusive=()):
    """The report of a sampled run with these checks."""
    likelihood = {"outcome": "pass", "adjusted_p_value": 0.31, "reason": None, "num_answers": 32}
    first_tokens = {"outcome": "pass", "adjusted_p_value": 0.4, "reason": None, "num_samples": 512}
    if failed:
        first_tokens |= {"outcome": "fail", "adjusted_p_value": 3.21e-7}
    if inconclusive:
        likelihood |= {"outcome": "inconclusive", "adjusted_p_value": None, "reason": "too_few_prompts"}
        first_tokens |= {"outcome": "inconclusive", "reason": "would_miss_what_it_must_show"}
    section = {
        "verdict": verdict,
        "checked_prompts": 32,
        "divergences": [],
        "failed_checks": list(failed),
        "inconclusive_checks": list(inconclusive),
        "checks": {
            "likelihood": likelihood,
            "first_tokens": first_tokens | {"detectable_difference": 0.12},
        },
    }
    return changed(report, {"decode.temperature": 1.0, "lossless": section})


def greedy(report, verdict, num_differing, **check):
    """The report of a greedy run of 3,412 tokens."""
    divergence = report.lossless.divergences[0].model_dump()
    section = {
        "verdict": verdict,
        "checked_prompts": 32,
        "checked_tokens": 3412,
        "differing_answers": num_differing,
        "tolerance": 0.58,
        "largest_gap": 0.113,
        "divergences": [divergence] * num_differing,
        "checks": {"greedy": {"wrong_tokens": 0, "wrong_ends": 0} | check},
    }
    return changed(report, {"lossless": section})


def lossless_finding(report):
    return next(finding for finding in judge(report, GateConfig()).findings if finding.check == "lossless")


ALL_RIGHT = "every one of 3,412 tokens is the target's choice within rounding; "


@pytest.mark.parametrize(
    ("verdict", "num_differing", "check", "words"),
    [
        ("lossless", 0, {}, f"{ALL_RIGHT}none of 32 answers differs from plain decoding's"),
        (
            "lossless_up_to_ties",
            23,
            {},
            f"{ALL_RIGHT}23 of 32 answers differ from plain decoding's, first where two tokens nearly tie",
        ),
        (
            "not_lossless",
            23,
            {"wrong_tokens": 5},
            "5 tokens are not the target's choice; 23 of 32 answers differ from plain decoding's",
        ),
    ],
)
def test_a_greedy_headline_counts_tokens_and_differing_answers(report, verdict, num_differing, check, words):
    report = greedy(report, verdict, num_differing, **check)
    assert f"; {words}." in headline(report)
    assert lossless_detail(report).startswith(
        f"{words}; a token lies up to 0.11 below the largest logit, and rounding explains "
    )


def test_a_failed_test_is_named_with_its_p_value(report):
    found = lossless_finding(sampled(report, "not_lossless", failed=["first_tokens"]))
    assert (found.outcome, "first tokens (p = 3.2e-07)" in found.reason) == ("fail", True)


def test_an_open_test_is_named_with_what_it_lacks_and_the_gate_stays_open(report):
    report = sampled(report, "inconclusive", inconclusive=["likelihood", "first_tokens"])
    named = "likelihood (too few prompts), first tokens (p = 0.4, would miss what it must show)"
    found = lossless_finding(report)
    assert found.outcome == "inconclusive"
    assert found.reason.endswith(f": {named}")


def test_a_sampled_headline_speaks_of_the_distribution(report):
    report = sampled(report, "lossless")
    assert (
        "; no difference from the target's distribution found (first tokens of 512 samples, p = 0.4; "
        "likelihood of 32 answers, p = 0.31)." in headline(report)
    )
    assert lossless_detail(report).endswith("; a total variation of 0.12 would show in four of five runs")

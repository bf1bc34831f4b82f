"""A losslessness check that failed or stayed open is named, with its grounds, wherever a person reads the verdict."""

from __future__ import annotations

from configs.schema.evaluation import GateConfig
from eval.release.checks import judge
from eval.report.text import lossless_detail
from tests.support.reports import changed


def sampled(report, verdict, failed=(), inconclusive=()):
    """The report of a sampled run with these checks."""
    section = {
        "verdict": verdict,
        "checked_prompts": 32,
        "divergences": [],
        "failed_checks": list(failed),
        "inconclusive_checks": list(inconclusive),
        "checks": {
            "enumeration": {"outcome": "pass"},
            "likelihood": {"outcome": "inconclusive", "adjusted_p_value": None, "reason": "too_few_prompts"},
            "first_tokens": {"outcome": "fail", "adjusted_p_value": 3.21e-7, "reason": None},
        },
    }
    return changed(report, {"decode.temperature": 1.0, "lossless": section})


def lossless_finding(report):
    return next(finding for finding in judge(report, GateConfig()).findings if finding.check == "lossless")


def test_a_failed_test_is_named_with_its_p_value(report):
    report = sampled(report, "not_lossless", failed=["first_tokens"])
    assert lossless_detail(report).endswith("; failed: first tokens (p = 3.2e-07)")
    found = lossless_finding(report)
    assert (found.outcome, found.reason) == ("fail", "failed: first tokens (p = 3.2e-07)")


def test_an_open_test_is_named_with_what_it_lacks_and_the_gate_stays_open(report):
    report = sampled(report, "inconclusive", inconclusive=["likelihood"])
    assert lossless_detail(report).endswith("; open: likelihood (too few prompts)")
    found = lossless_finding(report)
    assert found.outcome == "inconclusive"
    assert found.reason.endswith(": likelihood (too few prompts)")


def test_sampled_answers_are_not_said_to_be_equal(report):
    text = lossless_detail(sampled(report, "lossless"))
    assert text == "32 answers checked, sampled, and tested against the target's distribution"

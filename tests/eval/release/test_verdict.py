"""JUnit XML: well-formed whatever the names, a case a check, and nothing that did not pass looks as if it had."""

from xml.etree import ElementTree

import pytest

from eval.release.verdict import Finding, Verdict, as_junit

HOSTILE = "]]><testcase/> \x00\x1b[31m \"'&amp; \ud800 \uffff <script>"


def finding(outcome, check="tau", required="at least 1.5", reason="why"):
    return Finding(check=check, outcome=outcome, value=1.7, low=1.4, high=2.0, required=required, reason=reason)


@pytest.fixture
def suite():
    """The suite read back from a verdict with one finding of each outcome."""
    findings = (finding("pass", "a", reason=""), finding("fail", "b"), finding("inconclusive", "c"))
    root = ElementTree.fromstring(as_junit(Verdict(findings=findings, notes=("a note",))).encode())
    assert root.tag == "testsuites"
    return root.find("testsuite")


def test_the_counts_are_those_of_the_cases(suite):
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["3", "1", "1", "0"]
    assert [len(suite.findall(f"testcase{inner}")) for inner in ("", "/failure", "/error")] == [3, 1, 1]


def test_a_failure_says_what_was_measured_asked_and_why(suite):
    (failure,) = suite.findall("testcase/failure")

    assert failure.get("message") == "why"
    assert failure.text == "b is 1.7 [1.400, 2.000], asked: at least 1.5\nwhy"


def test_what_is_inconclusive_is_an_error_and_not_skipped(suite):
    (error,) = suite.findall("testcase/error")

    assert error.get("type") == "inconclusive"
    assert suite.findall("testcase/skipped") == []


def test_two_rules_on_one_number_are_two_cases_of_different_names():
    findings = (finding("pass"), finding("pass", required="at least 0.98 times the baseline"))
    root = ElementTree.fromstring(as_junit(Verdict(findings=findings)).encode())

    assert len({case.get("name") for case in root.iter("testcase")}) == 2


def test_hostile_text_stays_text_and_leaves_the_document_well_formed():
    hostile = finding("fail", check=HOSTILE, required=HOSTILE, reason=HOSTILE)
    text = as_junit(Verdict(findings=(hostile,), notes=(HOSTILE,)), suite=HOSTILE)

    root = ElementTree.fromstring(text.encode())

    assert len(list(root.iter("testcase"))) == 1
    assert list(root.iter("script")) == []
    shown = root.find("testsuite/testcase/failure").text
    assert "]]><testcase/>" in shown
    assert "<script>" in shown
    assert "\x1b" not in shown


def test_equal_verdicts_give_equal_files():
    verdict = Verdict(findings=(finding("fail"),))

    assert as_junit(verdict) == as_junit(verdict)

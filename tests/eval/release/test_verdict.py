"""A verdict in its four forms: every check and reason is there, the worst outcome leads."""

from xml.etree import ElementTree

from eval.release.verdict import Finding, GateVerdict, as_junit, as_markdown


def finding(outcome, **changes):
    values = {"check": "tau", "value": 1.7, "low": 1.4, "high": 2.0, "required": "at least 1.5", "reason": "why"}
    return Finding(outcome=outcome, **values | changes)


def test_the_summary_for_a_pull_request_names_the_draft_and_has_a_row_a_check(report):
    text = as_markdown(GateVerdict(findings=(finding("pass", reason=""), finding("inconclusive"))), report)
    assert text.startswith("## ❔ inconclusive: draft `runs/distill/artifact` (bbbbbbbbbbbb)")
    assert f"{report.speed.decode_speedup:.2f}× " in text
    assert "the speed of plain decoding" in text
    assert "| PASS | tau | 1.7 \\[1.400, 2.000] | at least 1.5 |  |" in text
    assert "| INCONCLUSIVE | tau | 1.7 \\[1.400, 2.000] | at least 1.5 | why |" in text


# --- JUnit --------------------------------------------------------------------------------------------------------


def parsed(*findings, notes=()):
    """The XML of a verdict, read back."""
    verdict = GateVerdict(findings=findings, notes=notes)
    assert as_junit(verdict) == as_junit(verdict)
    return ElementTree.fromstring(as_junit(verdict).encode())


def test_junit_has_a_case_a_check_and_nothing_that_did_not_pass_looks_as_if_it_had():
    suite = parsed(
        finding("pass", check="a", reason=""), finding("fail", check="b"), finding("inconclusive", check="c"), notes=("a note",)
    ).find("testsuite")
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["3", "1", "1", "0"]
    assert [len(suite.findall(f"testcase{inner}")) for inner in ("", "/failure", "/error", "/skipped")] == [3, 1, 1, 0]
    failure, error = suite.find("testcase/failure"), suite.find("testcase/error")
    assert (failure.get("message"), failure.text) == ("why", "b is 1.7 [1.400, 2.000], asked: at least 1.5\nwhy")
    assert error.get("type") == "inconclusive"

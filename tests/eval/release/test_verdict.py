"""A verdict in its four forms: every check and reason is there, the worst outcome leads, hostile names break nothing."""

from xml.etree import ElementTree

from eval.release.verdict import Finding, GateVerdict, as_junit, as_markdown
from tests.support.markdown import tokens_of
from tests.support.reports import changed

HOSTILE = "a|b\n<img src=x>`c` ![x](http://host) ]]><testcase/> \x00\x1b[31m \"'&amp; \ud800 \uffff <script>"


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


def test_hostile_names_break_neither_the_table_nor_the_page_around_it(report):
    report = changed(report, {"warnings": [HOSTILE], "draft.path": HOSTILE, "target.name": HOSTILE})
    hostile = finding("fail", check=HOSTILE, required=HOSTILE, reason=HOSTILE, value=HOSTILE)
    text = as_markdown(GateVerdict(findings=(hostile,), notes=(HOSTILE,)), report)
    (table,) = [block for block in text.split("\n\n") if block.startswith("| ")]
    assert {line.replace("\\|", "").count("|") for line in table.splitlines()} == {6}
    assert tokens_of(text).isdisjoint({"link_open", "image", "html_block", "html_inline"})


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


def test_hostile_text_stays_text_and_leaves_the_document_well_formed():
    root = parsed(finding("fail", check=HOSTILE, required=HOSTILE, reason=HOSTILE), notes=(HOSTILE,))
    assert len(list(root.iter("testcase"))) == 1
    assert list(root.iter("script")) == []
    shown = root.find("testsuite/testcase/failure").text
    assert "]]><testcase/>" in shown
    assert "<script>" in shown
    assert "\x1b" not in shown

"""A verdict told to people: every check and every reason is there, the worst outcome leads, hostile names break nothing."""

import json

import pytest

from eval.release.verdict import Finding, Verdict, as_markdown, as_table, as_values

HOSTILE = "a|b\n<img src=x>`c` ![x](http://host)"


def finding(outcome, **changes):
    values = {"check": "tau", "value": 1.7, "low": 1.4, "high": 2.0, "required": "at least 1.5", "reason": "why"}
    return Finding(outcome=outcome, **values | changes)


@pytest.mark.parametrize(
    ("outcomes", "worst"),
    [
        ((), "pass"),
        (("pass", "pass"), "pass"),
        (("pass", "inconclusive"), "inconclusive"),
        (("inconclusive", "fail", "pass"), "fail"),
    ],
)
def test_the_worst_finding_decides(report, outcomes, worst):
    verdict = Verdict(findings=tuple(finding(outcome) for outcome in outcomes) or ())

    assert verdict.outcome == worst
    assert worst in as_markdown(verdict, report).splitlines()[0]


def test_the_table_gives_the_reason_and_the_notes(report):
    text = as_table(Verdict(findings=(finding("fail"),), notes=("another machine",)))

    assert text.splitlines() == [
        "FAIL  tau  1.7 [1.400, 2.000]  asked: at least 1.5",
        "      why",
        "note: another machine",
        "",
        "gate: fail",
    ]


def test_the_summary_for_a_pull_request_names_the_draft_and_has_a_row_a_check(report):
    text = as_markdown(Verdict(findings=(finding("pass", reason=""), finding("inconclusive"))), report)

    assert text.startswith("## ❔ inconclusive: draft `runs/distill/artifact` (bbbbbbbbbbbb)")
    assert f"{report['speed']['decode_speedup']:.2f}× the speed of plain decoding" in text
    assert "| ✅ pass | tau | 1.7 \\[1.400, 2.000] | at least 1.5 |  |" in text
    assert "| ❔ inconclusive | tau | 1.7 \\[1.400, 2.000] | at least 1.5 | why |" in text


def test_hostile_names_break_neither_the_table_nor_the_page_around_it(report):
    report["warnings"] = [HOSTILE]
    report["draft"]["path"] = report["target"]["name"] = HOSTILE
    hostile = finding("fail", check=HOSTILE, required=HOSTILE, reason=HOSTILE, value=HOSTILE)

    text = as_markdown(Verdict(findings=(hostile,), notes=(HOSTILE,)), report)

    (table,) = [block for block in text.split("\n\n") if block.startswith("| ")]
    assert {line.replace("\\|", "").count("|") for line in table.splitlines()} == {6}
    assert "<img" not in text
    assert "![x](" not in text


def test_plain_values_hold_everything_and_survive_json():
    values = as_values(Verdict(findings=(finding("fail"),), notes=("a note",)))

    assert json.loads(json.dumps(values)) == values
    assert values["outcome"] == "fail"
    assert values["notes"] == ["a note"]
    assert values["findings"][0] == {
        "check": "tau",
        "outcome": "fail",
        "value": 1.7,
        "low": 1.4,
        "high": 2.0,
        "required": "at least 1.5",
        "reason": "why",
    }

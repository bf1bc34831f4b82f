"""A gate's verdict and its renderings: a table for a terminal, Markdown for a pull request, values for `gate.json`, JUnit XML.

The XML is what Jenkins, GitLab and the GitHub actions for test reports read; what stayed inconclusive is an `error`, because
most systems show `skipped` as green. Equal verdicts give equal files. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal
from xml.etree import ElementTree

from configs.runtime.terminal import one_line
from eval.report.markdown import as_markdown_table, code, escape
from eval.report.schema import Report
from eval.report.tables import Table, as_text
from eval.report.text import headline, settings, short, significant, warnings

GateOutcome = Literal["pass", "fail", "inconclusive"]
SIGNS = {"pass": "✅ pass", "fail": "❌ fail", "inconclusive": "❔ inconclusive"}
ELEMENTS = {"fail": "failure", "inconclusive": "error"}  # of JUnit
# Characters that no XML document may hold, not even escaped (XML 1.0, section 2.2).
FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found; `low` and `high` only where an interval was judged."""

    check: str
    outcome: GateOutcome
    value: float | str | None
    low: float | None = None
    high: float | None = None
    required: str
    reason: str = ""  # why it did not pass


@dataclass(frozen=True, kw_only=True)
class GateVerdict:
    """All findings. Any failure fails the gate, else anything inconclusive makes it inconclusive."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()  # differences to the baseline report that the gate allowed

    @property
    def outcome(self) -> GateOutcome:
        """The worst outcome among the findings."""
        outcomes = {finding.outcome for finding in self.findings}
        return "fail" if "fail" in outcomes else "inconclusive" if "inconclusive" in outcomes else "pass"


def as_values(verdict: GateVerdict) -> dict[str, Any]:
    """Return the verdict as plain JSON values."""
    return {"outcome": verdict.outcome, "findings": [asdict(each) for each in verdict.findings], "notes": list(verdict.notes)}


def findings_table(findings: Iterable[Finding]) -> Table:
    rows = [(each.outcome.upper(), each.check, measured(each), each.required, each.reason) for each in findings]
    return Table(title="Findings", header=("", "check", "measured", "required", "why not"), rows=rows)


def as_table(verdict: GateVerdict) -> str:
    """Return the verdict for a terminal: a line a check, the outcome last."""
    notes = [f"note: {one_line(note)}" for note in verdict.notes]
    return "\n".join([as_text(findings_table(verdict.findings)), *notes, "", f"gate: {verdict.outcome}"])


def as_markdown(verdict: GateVerdict, report: Report) -> str:
    """Return the verdict for a pull request: outcome, headline of the report judged, a row a check."""
    blocks = [
        f"## {SIGNS[verdict.outcome]}: draft {code(report.draft.path)} ({escape(short(report.draft.sha256))})",
        escape(headline(report)),
        *(f"> **Warning:** {escape(warning)}" for warning in warnings(report)),
        as_markdown_table(findings_table(verdict.findings), numbers=False),
        *(f"Note: {escape(note)}." for note in verdict.notes),
        f"Target {code(report.target.name)} ({escape(short(report.target.weights_sha256))}), {escape(settings(report))}.",
    ]
    return "\n\n".join(blocks) + "\n"


def measured(finding: Finding) -> str:
    """Return what a check found in a few characters, with the interval it was judged by."""
    if finding.value is None or isinstance(finding.value, str):
        return finding.value or "not measured"
    bounds = "" if finding.low is None else f" [{finding.low:.3f}, {finding.high:.3f}]"
    return f"{significant(finding.value, 4)}{bounds}"


def as_junit(verdict: GateVerdict) -> str:
    """Return the verdict as JUnit XML, a case a check, named with what it asks: two rules may be on the same number."""
    outcomes = [finding.outcome for finding in verdict.findings]
    counts = {"tests": len(outcomes), "failures": outcomes.count("fail"), "errors": outcomes.count("inconclusive")}
    attributes = {"name": "draftsmith gate"} | {name: str(count) for name, count in counts.items()}
    root = ElementTree.Element("testsuites", attributes)
    suite = ElementTree.SubElement(root, "testsuite", attributes | {"skipped": "0", "time": "0"})
    for each in verdict.findings:
        name, found = _legal(f"{each.check}: {each.required}"), f"{each.check} is {measured(each)}, asked: {each.required}"
        case = ElementTree.SubElement(suite, "testcase", {"classname": "draftsmith.gate", "name": name, "time": "0"})
        if each.outcome == "pass":
            ElementTree.SubElement(case, "system-out").text = _legal(found)
        else:
            why = {"type": each.outcome, "message": _legal(each.reason)}
            ElementTree.SubElement(case, ELEMENTS[each.outcome], why).text = _legal(f"{found}\n{each.reason}")
    if verdict.notes:
        ElementTree.SubElement(suite, "system-out").text = _legal("\n".join(verdict.notes))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _legal(text: str) -> str:
    """Return text without the characters that no XML document may hold."""
    return FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)

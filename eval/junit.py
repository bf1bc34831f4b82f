"""A gate's verdict as JUnit XML, which CI systems show test by test: one test case a check.

There is no written standard; this is the common core of what Jenkins, GitLab and the GitHub actions for test reports read:
`testsuites/testsuite/testcase`, with `failure` for what failed. A check that stayed inconclusive becomes an `error`, not
`skipped`, because most systems show skipped tests as green and an open question must not look like a pass. No time stamps:
equal verdicts give equal files.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from eval.verdict import Finding, Verdict, measured

ELEMENTS = {"fail": "failure", "inconclusive": "error"}
# XML 1.0, section 2.2: everything else may not stand in a document, not even escaped.
FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_junit(verdict: Verdict, suite: str = "draftsmith gate") -> str:
    """Return the XML document; text from outside is escaped, and characters that XML cannot hold are replaced.

    Args:
        verdict: what the gate found.
        suite: the suite's name.
    """
    outcomes = [finding.outcome for finding in verdict.findings]
    counts = {
        "tests": str(len(outcomes)),
        "failures": str(outcomes.count("fail")),
        "errors": str(outcomes.count("inconclusive")),
    }
    root = ElementTree.Element("testsuites", {"name": _legal(suite), **counts})
    suite_element = ElementTree.SubElement(root, "testsuite", {"name": _legal(suite), **counts, "skipped": "0", "time": "0"})
    for finding in verdict.findings:
        _add_case(suite_element, finding)
    if verdict.notes:
        ElementTree.SubElement(suite_element, "system-out").text = _legal("\n".join(verdict.notes))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _add_case(suite: ElementTree.Element, finding: Finding) -> None:
    """Add one check, named with what it asks: two rules may be on the same number."""
    name = _legal(f"{finding.check}: {finding.required}")
    case = ElementTree.SubElement(suite, "testcase", {"classname": "draftsmith.gate", "name": name, "time": "0"})
    found = f"{finding.check} is {measured(finding)}, asked: {finding.required}"
    if finding.outcome == "pass":
        ElementTree.SubElement(case, "system-out").text = _legal(found)
        return
    attributes = {"type": finding.outcome, "message": _legal(finding.reason)}
    ElementTree.SubElement(case, ELEMENTS[finding.outcome], attributes).text = _legal(f"{found}\n{finding.reason}")


def _legal(text: str) -> str:
    """Return text without the characters that no XML document may hold."""
    return FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)

"""A gate's verdict and how it is told: a table for a terminal, Markdown for a pull request, plain values for `gate.json`.

`eval.gating` reaches the verdict, `eval.junit` tells it to a CI system.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from eval.summary import escape, table
from eval.wording import headline, settings, short, warnings

Outcome = Literal["pass", "fail", "inconclusive"]
SIGNS = {"pass": "✅ pass", "fail": "❌ fail", "inconclusive": "❔ inconclusive"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found; `low` and `high` only where an interval was judged."""

    check: str
    outcome: Outcome
    value: float | str | None
    low: float | None = None
    high: float | None = None
    required: str
    reason: str = ""  # why it did not pass


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All findings, and what they come to: any failure fails, else anything inconclusive leaves it open."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()  # what the gate let pass, and a reader should know

    @property
    def outcome(self) -> Outcome:
        """The worst outcome among the findings."""
        outcomes = {finding.outcome for finding in self.findings}
        return "fail" if "fail" in outcomes else "inconclusive" if "inconclusive" in outcomes else "pass"


def as_values(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as plain JSON values: `outcome`, `findings`, `notes`."""
    return {
        "outcome": verdict.outcome,
        "findings": [asdict(finding) for finding in verdict.findings],
        "notes": list(verdict.notes),
    }


def as_table(verdict: Verdict) -> str:
    """Return the verdict for a terminal: a line a check, the reason under each that did not pass, the outcome last."""
    rows = [(each.outcome.upper(), each.check, measured(each), each.required, each.reason) for each in verdict.findings]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = []
    for outcome, check, found, required, reason in rows:
        lines.append(f"{outcome:<{widths[0]}}  {check:<{widths[1]}}  {found:<{widths[2]}}  asked: {required}")
        if reason:
            lines.append(f"{'':<{widths[0]}}  {reason}")
    return "\n".join([*lines, *(f"note: {note}" for note in verdict.notes), "", f"gate: {verdict.outcome}"])


def as_markdown(verdict: Verdict, report: Mapping[str, Any]) -> str:
    """Return the verdict fit for a pull request: outcome, headline of the report judged, a row a check."""
    rows = [
        (SIGNS[each.outcome], escape(each.check), escape(measured(each)), escape(each.required), escape(each.reason))
        for each in verdict.findings
    ]
    blocks = [
        f"## {SIGNS[verdict.outcome]}: draft `{escape(report['draft']['path'])}` ({short(report['draft']['sha256'])})",
        headline(report),
        *(f"> **Warning:** {escape(warning)}" for warning in warnings(report)),
        table(("", "check", "measured", "asked", "why not"), rows, numbers=False),
        *(f"Note: {escape(note)}." for note in verdict.notes),
        f"Target `{escape(report['target']['name'])}` ({short(report['target']['weights_sha256'])}), {settings(report)}.",
    ]
    return "\n\n".join(blocks) + "\n"


def measured(finding: Finding) -> str:
    """Return what a check found in a few characters, with the interval it was judged by."""
    if finding.value is None or isinstance(finding.value, str):
        return finding.value or "not measured"
    bounds = "" if finding.low is None else f" [{finding.low:.3f}, {finding.high:.3f}]"
    return f"{finding.value:.4g}{bounds}"

"""Lines of the check with their verdicts, and the page that shows them."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from configs.runtime.errors import first_line
from eval.report.markdown import escape, table

log = logging.getLogger("draftsmith")

Verdict = Literal["ok", "fails", "measured", "not here"]

CLOSING = "Where a line fails, send us this page, `gpu-check.json` beside it and the log. Where none does, both are as welcome."


@dataclass(frozen=True, kw_only=True)
class Line:
    """One thing that was looked at."""

    part: str
    what: str
    found: str
    expected: str = "–"  # with the reason for its tolerance
    verdict: Verdict = "measured"


def held(part: str, what: str, found: str, expected: str, is_so: bool) -> Line:
    """Return a line that is judged."""
    return Line(part=part, what=what, found=found, expected=expected, verdict="ok" if is_so else "fails")


def tried(part: str, what: str, make: Callable[[], Line]) -> Line:
    """Return the line that `make` gives; one that says so where it breaks, as this code meets its first devices."""
    try:
        return make()
    except Exception as error:  # whatever a device does that none before it did
        log.error("%s", traceback.format_exc())
        return Line(part=part, what=what, found=f"{type(error).__name__}: {first_line(error)}", verdict="fails")


def absent(part: str, what: str, why: str) -> Line:
    """Return a line of what cannot be had on this machine."""
    return Line(part=part, what=what, found=why, verdict="not here")


def page_of(lines: Sequence[Line], origin: Mapping[str, Any], device: str) -> str:
    """Return the page, in Markdown."""
    failed = sum(line.verdict == "fails" for line in lines)
    verdict = f"{failed} of {len(lines)} lines fail" if failed else f"none of {len(lines)} lines fails"
    machine = ", ".join(gpu["name"] for gpu in origin["hardware"]["gpus"]) or origin["hardware"]["cpu"]
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    rows = [tuple(map(escape, (line.part, line.what, line.found, line.expected, line.verdict))) for line in lines]
    return "\n\n".join(
        [
            f"# GPU check: {verdict}",
            escape(f"{machine}, device {device}; {versions}; commit {origin['git']['commit']}"),
            table(("part", "what", "found", "expected", "verdict"), rows, numbers=False),
            CLOSING,
        ]
    )

"""What must hold before a draft is published: the report is this artifact's, it was measured, and a gate passed it.

The verdict is the `gate.json` that `draftsmith gate` left beside the report. Nothing here touches the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import read_json, sha256_of
from configs.schema.evaluation import GateConfig
from eval.release import Finding, GateVerdict, judge_rules, read_artifact
from eval.report.schema import Report, load_report
from eval.report.text import short
from heads.metadata import Metadata, read_metadata


@dataclass(frozen=True, kw_only=True)
class Release:
    """An artifact in its folder, with its hash, its checked report, and the gate's verdict and config."""

    folder: Path
    metadata: Metadata
    sha256: str
    report: Report
    verdict: GateVerdict
    gate: Mapping[str, Any]


def read_release(folder: Path, report_path: Path) -> Release:
    """Read an artifact, the report of its evaluation, and what the gate says of that; a gate that failed raises nothing."""
    metadata = read_metadata(folder)
    report, sha256 = load_report(report_path), read_artifact([folder]).sha256
    if report.draft.sha256 != sha256:
        raise InputError(
            f"{report_path} is not of {folder}: it measured a {report.draft.kind} with hash {short(report.draft.sha256)}, the "
            f"artifact's is {short(sha256)}; evaluate this artifact (draftsmith eval) and push with that report"
        )
    judged, rules = _stored_verdict(report_path)
    return Release(folder=folder, metadata=metadata, sha256=sha256, report=report, verdict=judged, gate=rules)


def _stored_verdict(report_path: Path) -> tuple[GateVerdict, Mapping[str, Any]]:
    """Return what the gate said of a report, and by which rules; a gate that asked for neither tau nor speed did not pass."""
    path = report_path.with_name("gate.json")
    if not path.is_file():
        raise InputError(
            f"no gate has judged {report_path}: run draftsmith gate, by a config such as configs/gates/first_release.yaml"
        )
    record = read_json(path, "the gate's verdict")
    try:
        judged, rules = record["report_sha256"], record["config"]
        findings = [Finding(**each) for each in record["findings"]]
        findings += [each for each in judge_rules(GateConfig.model_validate(rules)) if each not in findings]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is no verdict of the gate ({first_line(error)}); run draftsmith gate again") from error
    if judged != sha256_of(report_path):
        raise InputError(f"{path} judged another report than {report_path}; run draftsmith gate again")
    return GateVerdict(findings=tuple(findings)), rules

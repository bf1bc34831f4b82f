"""What must hold before a draft is published: the report is this artifact's, it was measured, and a gate passed it.

The verdict is the `gate.json` that `eval/gate.py` left beside the report. Nothing here touches the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.files import read_json, sha256_of
from configs.schema.commands.release import PushConfig
from eval.release.checks import read_artifact
from eval.release.verdict import Finding, GateVerdict
from eval.report.schema import Report, load_report
from eval.report.text import short
from heads.metadata import Metadata, read_metadata

STORED_VERDICT = "gate.json"


@dataclass(frozen=True, kw_only=True)
class Release:
    """An artifact in its folder, with its hash, its checked report, and the gate's verdict and config."""

    folder: Path
    metadata: Metadata
    sha256: str
    report: Report
    report_path: Path
    verdict: GateVerdict
    gate: Mapping[str, Any]


def read_release(folder: Path, report_path: Path, config: PushConfig) -> Release:
    """Read an artifact, the report of its evaluation, and what the gate says of that; a gate that failed raises nothing."""
    metadata = read_metadata(folder)
    _refuse_links_out(folder)
    report = load_report(report_path)
    shipped = read_artifact([folder])
    _check_report(report, report_path, shipped.sha256, folder, config)
    verdict, rules = _stored_verdict(report_path)
    return Release(
        folder=folder,
        metadata=metadata,
        sha256=shipped.sha256,
        report=report,
        report_path=report_path,
        verdict=verdict,
        gate=rules,
    )


def _refuse_links_out(folder: Path) -> None:
    """Refuse links to files elsewhere, but those of a snapshot in the Hub's cache into the `blobs` of its repository."""
    root = folder.resolve()
    homes = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)
    for path in sorted(root.rglob("*")):
        if path.is_symlink() and not (path.exists() and any(path.resolve().is_relative_to(home) for home in homes)):
            raise InputError(
                f"{path} is a link to {path.readlink()}, outside the folder; put a copy in its place, or remove it"
            )


def _check_report(report: Report, path: Path, sha256: str, folder: Path, config: PushConfig) -> None:
    measured = report.draft.sha256
    if measured != sha256:
        raise InputError(
            f"{path} is not of {folder}: it measured a {report.draft.kind} with hash {short(measured)}, the artifact's "
            f"is {short(sha256)}; evaluate this artifact (eval/run.py) and push with that report"
        )
    verdict = report.lossless.verdict
    if verdict in ("not_lossless", "lossy_by_design") and not config.allow_lossy:
        raise InputError(
            f"{path} is of decoding that changes the target's answers (lossless.verdict {verdict}): evaluate with a lossless "
            "rule, or publish it as what it is with --set allow_lossy=true"
        )


def _stored_verdict(report_path: Path) -> tuple[GateVerdict, Mapping[str, Any]]:
    """Return what `eval/gate.py` said of a report, and by which rules."""
    path = report_path.with_name(STORED_VERDICT)
    if not path.is_file():
        raise InputError(
            f"no gate has judged {report_path}: run eval/gate.py on it, by a config such as configs/gates/first_release.yaml"
        )
    record = read_json(path, "the gate's verdict")
    try:
        judged, findings, rules = record["report_sha256"], record["findings"], record["config"]
        verdict = GateVerdict(findings=tuple(Finding(**each) for each in findings), notes=tuple(record.get("notes", ())))
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} is no verdict of this draftsmith's gate ({error}); run eval/gate.py again") from error
    if judged != sha256_of(report_path):
        raise InputError(f"{path} judged another report than {report_path}; run eval/gate.py again")
    return verdict, rules

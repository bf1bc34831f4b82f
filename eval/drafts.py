"""The draft under evaluation: one artifact, or several whose candidates are merged into one tree (`heads.merged_drafts`).

The report's draft section names every part. Its hash is a single artifact's own, or that of all the parts' hashes in their
order, which the gate forms again from the folders that it is given (`eval.shipped`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from configs.evaluating import EvalConfig
from distill.target import Target
from heads.artifact import Draft, hash_together, load_draft
from heads.merged_drafts import MergedDrafts
from heads.proposer import Proposer

MERGED = "merged"


@dataclass(frozen=True, kw_only=True)
class EvaluatedDraft:
    """What is evaluated.

    Args:
        paths: the artifact folders.
        parts: what was loaded from them.
        proposer: the one part's, or all of them as one.
    """

    paths: tuple[str, ...]
    parts: tuple[Draft, ...]
    proposer: Proposer

    @property
    def warnings(self) -> list[str]:
        """What the reader of the report must know of the parts."""
        return [warning for part in self.parts for warning in part.warnings]

    @property
    def section(self) -> dict[str, Any]:
        """The report's draft section; that of several adds up their parameters and lists each under `parts`."""
        each = [_section(path, part) for path, part in zip(self.paths, self.parts, strict=True)]
        if len(each) == 1:
            return each[0]
        return {
            "kind": MERGED,
            "path": " + ".join(self.paths),
            "sha256": hash_together([part["sha256"] for part in each]),
            "num_parameters": sum(part["num_parameters"] for part in each),
            "target_sha256": agreed(part["target_sha256"] for part in each),
            "parts": each,
        }


def load_evaluated(config: EvalConfig, target: Target) -> EvaluatedDraft:
    """Load what `draft` names, for a target.

    Raises:
        InputError: see `heads.artifact.load_draft`.
    """
    parts = tuple(
        load_draft(
            path,
            target.identity,
            target.model,
            allow_target_mismatch=config.allow_target_mismatch,
            device=config.draft_device,
        )
        for path in config.drafts
    )
    proposers = [part.proposer for part in parts]
    merged = proposers[0] if len(proposers) == 1 else MergedDrafts(proposers, target.device)
    return EvaluatedDraft(paths=tuple(config.drafts), parts=parts, proposer=merged)


def agreed(hashes: Iterable[str]) -> str:
    """Return the hash that all have; where they differ, all of them, which equals none."""
    return ", ".join(dict.fromkeys(hashes))


def _section(path: str, draft: Draft) -> dict[str, Any]:
    return {
        "kind": draft.metadata.kind,
        "path": path,
        "sha256": draft.sha256,
        "num_parameters": draft.num_parameters,
        "target_sha256": draft.metadata.target["weights_sha256"],
    }

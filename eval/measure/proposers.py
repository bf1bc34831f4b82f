"""The proposers of an evaluation: the draft under evaluation (`load_evaluated`), and the baselines (`make_baselines`).

The draft is one artifact, or several whose candidates are merged into one tree (`heads.proposers.lookup`). Baselines need no
training; suffix lookup knows the answers of `lookup_answers`, and those to the prompts that this process measured before
(`Measurement.teach`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema.evaluation import EvalConfig, FreeDraft
from distill.dataset.conversations import check_written_for, first_answers
from distill.generation.prompts import Prompt
from heads.artifact import Draft, load_draft
from heads.frozen.identity import TargetIdentity
from heads.frozen.loading import Target
from heads.metadata import agreed, hash_together
from heads.proposers.lookup import LookupFirst, MergedDrafts, PromptLookup, SuffixLookup
from heads.proposers.protocol import Proposer
from heads.proposers.suffixes import KNOWN_TOKENS

log = logging.getLogger("draftsmith")

Answers = Sequence[Sequence[int]]  # token ids


@dataclass(frozen=True, kw_only=True)
class EvaluatedDraft:
    """The draft under evaluation."""

    paths: tuple[str, ...]  # the artifact folders
    parts: tuple[Draft, ...]
    proposer: Proposer  # the one part's, or all of them as one

    @property
    def warnings(self) -> list[str]:
        return [warning for part in self.parts for warning in part.warnings]

    @property
    def section(self) -> dict[str, Any]:
        """The report's draft section. Several parts are listed under `parts`; their hash is that of all hashes in order."""
        each = [
            {
                "kind": part.metadata.kind,
                "path": path,
                "sha256": part.sha256,
                "num_parameters": part.num_parameters,
                "target_sha256": part.metadata.target["weights_sha256"],
            }
            for path, part in zip(self.paths, self.parts, strict=True)
        ]
        if len(each) == 1:
            return each[0]
        return {
            "kind": "merged",
            "path": " + ".join(self.paths),
            "sha256": hash_together([part["sha256"] for part in each]),
            "num_parameters": sum(part["num_parameters"] for part in each),
            "target_sha256": agreed(part["target_sha256"] for part in each),
            "parts": each,
        }


def load_evaluated(config: EvalConfig, target: Target) -> EvaluatedDraft:
    """Load the artifacts that `config.draft` names, for a target."""
    allowed, device = config.allow_target_mismatch, config.draft_device
    parts = tuple(
        load_draft(path, target.identity, target.model, allow_target_mismatch=allowed, device=device) for path in config.drafts
    )
    proposers = [part.proposer for part in parts]
    proposer = proposers[0] if len(proposers) == 1 else MergedDrafts(proposers, target.device)
    return EvaluatedDraft(paths=tuple(config.drafts), parts=parts, proposer=proposer)


def add_lookup(draft: Proposer, config: EvalConfig, target: Target, answers: Answers = ()) -> Proposer:
    """Return suffix lookup before the draft, round by round; the draft may not decode by itself at the same time.

    It decodes with `config.suffix_length` as `num_speculative_tokens`; the draft makes those of `config.decode` at most.
    """
    lookup = SuffixLookup(target.device, answers, min_expected=config.lookup_must_expect)
    return LookupFirst(lookup, draft, target.vocab_size, num_drafts=config.decode.num_speculative_tokens)


def make_baselines(config: EvalConfig, target: Target, answers: Answers = ()) -> dict[str, Proposer]:
    """Return the proposers that `baselines` names, in its order."""
    makers: dict[FreeDraft, Callable[[], Proposer]] = {
        "prompt_lookup": lambda: PromptLookup(target.device),
        "suffix_lookup": lambda: SuffixLookup(target.device, answers),
    }
    return {name: makers[name]() for name in config.baselines}


def known_answers(config: EvalConfig, prompts: Sequence[Prompt], identity: TargetIdentity) -> Answers:
    """Return the first answers of `lookup_answers`, `KNOWN_TOKENS` at most, but those to prompts of the suites."""
    if config.lookup_answers is None:
        return []
    path = Path(config.lookup_answers)
    check_written_for(path, identity)
    known = first_answers(path, KNOWN_TOKENS, [text for prompt in prompts for text in prompt.user_texts])
    log.info("suffix lookup knows %d answers of %s", len(known), path)
    return known

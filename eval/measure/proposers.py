"""The proposers of an evaluation: the draft under evaluation (`load_evaluated`), and the baselines (`make_baselines`).

The draft is one artifact, or several whose candidates are merged into one tree, or one after a lookup
(`heads.proposers.merged`). Baselines need no training; suffix lookup remembers the answers to the prompts that this process
measured before (`Measurement.teach`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState

from configs.schema.evaluation import LOOKUPS, EvalConfig, FreeDraft
from eval.decoder.decode import Request, decode
from eval.measure.record_files import choose_once
from heads.artifact import Draft, load_draft
from heads.frozen.hidden_states import num_blocks
from heads.frozen.loading import Target
from heads.metadata import agreed, hash_together
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import PromptLookup, SuffixLookup
from heads.proposers.merged import LookupFirst, MergedDrafts
from heads.proposers.protocol import LooksUp, Proposer
from heads.proposers.self_speculation import early_exit

log = logging.getLogger("draftsmith")

LOOKUP_LENGTHS = (2, 4, 8)  # beside the draft's own number
LOOKUP_PROMPTS = 4
LONGEST_MATCH = 8  # tokens by which prompt lookup beside a draft tells one place of a text from another


@dataclass(frozen=True, kw_only=True)
class EvaluatedDraft:
    """The draft under evaluation."""

    paths: tuple[str, ...]  # the artifact folders
    parts: tuple[Draft, ...]
    lookups: tuple[str, ...]  # that draft beside them
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
        lookups = {"lookups": list(self.lookups)} if self.lookups else {}
        if len(each) == 1:
            return each[0] | lookups
        return lookups | {
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
    proposer = _as_one([part.proposer for part in parts], config.lookups, config, target)
    return EvaluatedDraft(paths=tuple(config.drafts), parts=parts, lookups=tuple(config.lookups), proposer=proposer)


def add_lookup(draft: Proposer, config: EvalConfig, target: Target) -> Proposer:
    """Return the draft with prompt lookup before it; the two may not decode at the same time."""
    return _as_one([draft], ["prompt_lookup"], config, target)


def _as_one(drafts: Sequence[Proposer], names: Sequence[FreeDraft], config: EvalConfig, target: Target) -> Proposer:
    shortest, longest = config.lookup_match, max(config.lookup_match, LONGEST_MATCH)
    lookups: dict[str, Callable[[], LooksUp]] = {
        "prompt_lookup": lambda: PromptLookup(target.device, longest=longest, shortest=shortest),
        "suffix_lookup": lambda: SuffixLookup(target.device, shortest=shortest),
    }
    found = [lookups[name]() for name in names]
    if config.decode.tree is None and len(drafts) == len(found) == 1:
        return LookupFirst(found[0], drafts[0])
    several = [*drafts, *found]
    return several[0] if len(several) == 1 else MergedDrafts(several, target.device)


def make_baselines(config: EvalConfig, target: Target) -> dict[str, Proposer]:
    """Return the proposers that `baselines` names, in its order."""

    def self_speculation() -> Proposer:
        num_layers = config.self_speculation_layers or max(1, num_blocks(target.model) // 4)
        return DraftLM(early_exit(target.model, num_layers), target.vocab_size)

    makers: dict[FreeDraft, Callable[[], Proposer]] = {
        "prompt_lookup": lambda: PromptLookup(target.device),
        "suffix_lookup": lambda: SuffixLookup(target.device),
        "self_speculation": self_speculation,
    }
    return {name: makers[name]() for name in config.baselines}


# --- how many tokens a lookup drafts --------------------------------------------------------------------------------


def find_lookup_length(
    config: EvalConfig, requests: Sequence[Request], target: Target, state: PartialState, job: str
) -> EvalConfig:
    """Return the config with `lookup_num_speculative_tokens`, chosen where it is None and a baseline looks up."""
    own = config.decode.num_speculative_tokens
    if config.lookup_num_speculative_tokens is not None or not own or not set(config.baselines) & set(LOOKUPS):
        return config
    known = choose_once(Path(config.output), "lookup", job, state, lambda: fastest_length(config, requests, target))
    log.info("prompt lookup drafts %d tokens a round, the fastest of %s on %d prompts", *known)
    return config.model_copy(update={"lookup_num_speculative_tokens": known[0]})


def fastest_length(config: EvalConfig, requests: Sequence[Request], target: Target) -> tuple[int, list[int], int]:
    """Return the number of drafts a round at which prompt lookup is fastest, those that were tried, and by how many prompts."""
    lengths = sorted({*LOOKUP_LENGTHS, config.decode.num_speculative_tokens})
    step = max(1, len(requests) // LOOKUP_PROMPTS)
    chosen = list(requests[::step][: max(LOOKUP_PROMPTS, config.decode.batch_size)])
    plain = config.decode.model_copy(update={"tree": None, "stopping": None, "lossy": None})
    settings = {length: plain.model_copy(update={"num_speculative_tokens": length}) for length in lengths}
    seconds, tokens = dict.fromkeys(lengths, 0.0), dict.fromkeys(lengths, 0)
    for start in range(0, len(chosen), plain.batch_size):
        batch = chosen[start : start + plain.batch_size]
        for length in lengths[:: -1 if start % 2 else 1]:
            _, timing = decode(target, batch, settings[length], PromptLookup(target.device))
            seconds[length] += timing.decode_seconds
            tokens[length] += timing.num_tokens
    return max(lengths, key=lambda length: tokens[length] / max(seconds[length], 1e-9)), lengths, len(chosen)

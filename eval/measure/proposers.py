"""The proposers of an evaluation: the draft under evaluation (`load_evaluated`), and the baselines (`make_baselines`).

The draft is one artifact, or several whose candidates are merged into one tree, or one with a lookup
(`heads.proposers.merged`). Baselines need no training; suffix lookup knows the answers of `lookup_answers`, and those to the
prompts that this process measured before (`Measurement.teach`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState

from configs.schema.evaluation import LOOKUPS, EvalConfig, FreeDraft
from distill.dataset.conversations import check_written_for, first_answers
from distill.generation.prompts import Prompt
from eval.decoder.decode import Request, decode
from eval.decoder.records import Timing
from eval.measure.interleaved import in_batches
from eval.measure.record_files import choose_once
from heads.artifact import Draft, load_draft
from heads.frozen.hidden_states import num_blocks
from heads.frozen.identity import TargetIdentity
from heads.frozen.loading import Target
from heads.metadata import agreed, hash_together
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import PromptLookup, SuffixLookup
from heads.proposers.merged import LookupFirst, LookupFirstTrees, MergedDrafts
from heads.proposers.protocol import LooksUp, Proposer, TreeProposer
from heads.proposers.self_speculation import early_exit
from heads.proposers.suffixes import KNOWN_TOKENS

log = logging.getLogger("draftsmith")

LOOKUP_LENGTHS = (2, 4, 8)  # beside the draft's own number
LOOKUP_PROMPTS = 4
LONGEST_MATCH = 8  # tokens by which prompt lookup beside a draft tells one place of a text from another
EXPECTED = 2.25  # `lookup_expects` of greedy answers at most, and where nothing was measured
HELD = 0.5  # of what suffix lookup expects below that comes true there, about
# By temperature, what comes true in drawn answers over that in greedy ones: SmolLM2's, about, where it expects a draft or more
OF_DRAWN = ((0.0, 0.6, 1.0), (1.0, 0.74, 0.37))

Answers = Sequence[Sequence[int]]  # token ids


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


def load_evaluated(config: EvalConfig, target: Target, answers: Answers = ()) -> EvaluatedDraft:
    """Load the artifacts that `config.draft` names, for a target; a suffix lookup among them knows `answers`."""
    allowed, device = config.allow_target_mismatch, config.draft_device
    parts = tuple(
        load_draft(path, target.identity, target.model, allow_target_mismatch=allowed, device=device) for path in config.drafts
    )
    proposer = _as_one([part.proposer for part in parts], config.lookups, config, target, answers)
    return EvaluatedDraft(paths=tuple(config.drafts), parts=parts, lookups=tuple(config.lookups), proposer=proposer)


def add_lookup(draft: Proposer, config: EvalConfig, target: Target, answers: Answers = ()) -> Proposer:
    """Return the draft with suffix lookup beside it; the two may not decode at the same time.

    It decodes with `config.suffix_length` as `num_speculative_tokens`; the draft makes those of `config.decode` at most.
    """
    return _as_one([draft], ["suffix_lookup"], config, target, answers, config.suffix_length)


def _as_one(
    drafts: Sequence[Proposer],
    names: Sequence[FreeDraft],
    config: EvalConfig,
    target: Target,
    answers: Answers,
    looked_up: int | None = None,
) -> Proposer:
    shortest, longest = config.lookup_match, max(config.lookup_match, LONGEST_MATCH)
    expects = must_expect(EXPECTED, config.decode.temperature) if config.lookup_expects is None else config.lookup_expects
    in_turns = len(drafts) == len(names) == 1 and (
        config.decode.tree is None or (names[0] == "suffix_lookup" and isinstance(drafts[0], TreeProposer))
    )
    lookups: dict[str, Callable[[], LooksUp]] = {
        "prompt_lookup": lambda: PromptLookup(target.device, longest=longest, shortest=shortest),
        "suffix_lookup": lambda: SuffixLookup(target.device, answers, min_expected=expects if in_turns else 0.0),
    }
    found = [lookups[name]() for name in names]
    if in_turns:
        (draft,), (lookup,) = drafts, found
        own = config.decode.num_speculative_tokens
        if isinstance(draft, TreeProposer):
            return LookupFirstTrees(lookup, draft, num_drafts=own, num_looked_up=looked_up or own)
        return LookupFirst(lookup, draft, num_drafts=own)
    several = [*drafts, *found]
    return several[0] if len(several) == 1 else MergedDrafts(several, target.device)


def make_baselines(config: EvalConfig, target: Target, answers: Answers = ()) -> dict[str, Proposer]:
    """Return the proposers that `baselines` names, in its order."""

    def self_speculation() -> Proposer:
        num_layers = config.self_speculation_layers or max(1, num_blocks(target.model) // 4)
        return DraftLM(early_exit(target.model, num_layers), target.vocab_size)

    makers: dict[FreeDraft, Callable[[], Proposer]] = {
        "prompt_lookup": lambda: PromptLookup(target.device),
        "suffix_lookup": lambda: SuffixLookup(target.device, answers),
        "self_speculation": self_speculation,
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


# --- what a lookup drafts -------------------------------------------------------------------------------------------


def choose_lookup(
    config: EvalConfig, requests: Sequence[Request], target: Target, draft: Proposer, state: PartialState, job: str
) -> EvalConfig:
    """Return the config with `lookup_num_speculative_tokens` and `lookup_expects`, chosen where they are None and needed."""
    own, changes = config.decode.num_speculative_tokens, dict[str, Any]()
    chosen = _spread(config, requests)

    def once(name: str, choose: Callable[[], Any]) -> Any:
        return choose_once(Path(config.output), name, job, state, choose)

    if config.lookup_num_speculative_tokens is None and own and set(config.baselines) & set(LOOKUPS):
        known = once("lookup", lambda: fastest_length(config, chosen, target))
        log.info("prompt lookup drafts %d tokens a round, the fastest of %s on %d prompts", *known)
        changes["lookup_num_speculative_tokens"] = known[0]
    if config.lookup_expects is None and config.tries_lookup:
        drawn_at = config.decode.temperature
        expects = once("lookup_expects", lambda: must_expect(break_even(_decode(config, chosen, target, draft)), drawn_at))
        log.info("suffix lookup takes the draft's place where it expects %.2f accepted drafts", expects)
        changes["lookup_expects"] = expects
    return config.model_copy(update=changes)


def fastest_length(config: EvalConfig, requests: Sequence[Request], target: Target) -> tuple[int, list[int], int]:
    """Return the number of drafts a round at which prompt lookup is fastest, those that were tried, and by how many prompts."""
    lengths = sorted({*LOOKUP_LENGTHS, config.decode.num_speculative_tokens})
    plain = config.decode.model_copy(update={"tree": None, "stopping": None, "lossy": None})
    settings = {length: plain.model_copy(update={"num_speculative_tokens": length}) for length in lengths}
    seconds, tokens = dict.fromkeys(lengths, 0.0), dict.fromkeys(lengths, 0)
    for number, batch in enumerate(_warm_up_first(requests, plain.batch_size)):
        for length in lengths[:: -1 if number % 2 else 1]:
            _, timing = decode(target, batch, settings[length], PromptLookup(target.device))
            if number:
                seconds[length] += timing.decode_seconds
                tokens[length] += timing.num_tokens
    return max(lengths, key=lambda length: tokens[length] / max(seconds[length], 1e-9)), lengths, len(requests)


def break_even(timings: Sequence[Timing]) -> float:
    """Return how many drafts a lookup must expect of a greedy answer to be worth a round of the draft, whose timings these are.

    With r tokens a second, a round of the draft that takes d seconds longer has to bring r * d tokens more. From `EXPECTED`
    on, a draft that has its counts mixed in does no better.
    """
    tokens, rounds = sum(each.num_tokens for each in timings), sum(each.num_rounds for each in timings)
    seconds, drafting = sum(each.decode_seconds for each in timings), sum(each.draft_seconds for each in timings)
    if not rounds or not seconds:
        return EXPECTED
    worth = tokens / rounds - 1 - tokens / seconds * drafting / rounds
    return min(max(0.0, worth / HELD), EXPECTED)


def must_expect(of_greedy: float, temperature: float) -> float:
    """Return how many drafts a lookup must expect at a temperature where it must expect `of_greedy` of a greedy answer."""
    return of_greedy / float(np.interp(temperature, *OF_DRAWN))


def _decode(config: EvalConfig, requests: Sequence[Request], target: Target, draft: Proposer) -> list[Timing]:
    batches = _warm_up_first(requests, config.decode.batch_size)
    return [decode(target, batch, config.decode, draft)[1] for batch in batches][1:]


def _warm_up_first(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    """Return batches, the first of them twice: the first time, in which a forward may be compiled, is not to be counted."""
    batches = in_batches(requests, size)
    return [*batches[:1], *batches]


def _spread(config: EvalConfig, requests: Sequence[Request]) -> list[Request]:
    """Return a few requests, a batch at least."""
    step = max(1, len(requests) // LOOKUP_PROMPTS)
    return list(requests[::step][: max(LOOKUP_PROMPTS, config.decode.batch_size)])

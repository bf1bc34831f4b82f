"""What the decode benchmark measures: the target by either forward, the drafts, the prompts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from distill.dataset.conversations import read_conversations
from eval.decoder.decode import Request, check_decodable
from eval.decoder.records import Generation, Timing
from heads.artifact import Draft, load_draft
from heads.frozen.loading import Target, load_target, move
from heads.inference.lean_forward import make_lean
from heads.proposers.protocol import Proposer
from scripts.lab.bench.head_recipes import train_recipes
from scripts.lab.bench.provenance import check_trained_here
from scripts.lab.bench.turns import first_requests, measured_rows
from scripts.lab.settings import BenchDecodeConfig

log = logging.getLogger("draftsmith")

DRAFT_LM = "draft_lm"

Requests = Sequence[Request]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a side made of some prompts; transformers keeps no timings by phase."""

    generations: list[Generation]
    timings: list[Timing]

    @property
    def num_tokens(self) -> int:
        """New token ids, the first of each answer included."""
        return sum(len(generation.tokens) for generation in self.generations)


Side = Callable[[Requests, int], Answers]


@dataclass(frozen=True, kw_only=True)
class DecodeSetup:
    config: BenchDecodeConfig
    target: Target
    proposer: Proposer  # the draft LM for `target`
    lean_target: Target | None  # the same weights, run by a lean forward; None where its family has none
    drafts: dict[str, Draft]  # for `fastest_target`, by what the table calls them; the draft LM first
    requests: list[Request]
    choosing: list[Request]  # others, which choose trees and lengths
    past_answers: list[list[int]]  # token ids of the target's answers to other prompts

    @property
    def fastest_target(self) -> Target:
        return self.target if self.lean_target is None else self.lean_target

    def settings(self, temperature: float) -> DecodeConfig:
        return DecodeConfig(
            num_speculative_tokens=self.config.num_speculative_tokens,
            max_new_tokens=self.config.max_new_tokens,
            temperature=temperature,
        )


def load_setup(config: BenchDecodeConfig) -> DecodeSetup:
    folders, past = {DRAFT_LM: config.draft}, config.past_answers
    check_trained_here([config.draft], config.output)
    if config.heads is not None:
        folders |= {run.name: str(run.artifact) for run in train_recipes(config.heads, output=config.output)}
    rows = measured_rows(Path(config.held_out), config.num_prompts, config.num_choosing)
    requests = first_requests(rows)
    choosing = first_requests(read_conversations(Path(config.held_out))[: config.num_choosing])
    target = load_target(config.target.model_copy(update={"forward": "transformers"}))
    check_decodable(target, [*requests, *choosing])
    lean_target = _run_lean(target)
    fastest = target if lean_target is None else lean_target
    loaded = {name: load_draft(folder, target.identity, fastest.model) for name, folder in folders.items()}
    for name, draft in loaded.items():
        for warning in draft.warnings:
            log.warning("%s: %s", name, warning)
    return DecodeSetup(
        config=config,
        target=target,
        proposer=load_draft(config.draft, target.identity, target.model).proposer,
        lean_target=lean_target,
        drafts=loaded,
        requests=requests,
        choosing=choosing,
        past_answers=[] if past is None else [list(row.answer_ids) for row in read_conversations(Path(past))],
    )


def load_for_transformers(draft: str, target: Target) -> PreTrainedModel:
    """Load a draft LM's artifact once more, as a user of transformers does: ours may keep a part of its head only."""
    attention = target.model.config._attn_implementation
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=target.model.dtype, attn_implementation=attention)
    return move(model, target.device).eval()


def _run_lean(target: Target) -> Target | None:
    twin = copy.copy(target.model)  # of the same weights
    try:
        make_lean(twin)
        return replace(target, model=twin)
    except InputError as error:
        log.warning("lean forwards are not measured: %s", error)
        return None

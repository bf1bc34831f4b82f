"""What the decode benchmark measures: the target by either forward, the draft, the prompts (`scripts.decode_comparison`: how).

The two forwards run the very same weights; the lean one (`heads.lean_forward`) adds its packed copy of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.benchmarks import BenchDecodeConfig
from configs.errors import InputError
from configs.schema import DecodeConfig
from distill.target import Target, load_target, move
from eval.decode import Request, check_decodable
from eval.records import Generation, Timing
from eval.suite import load_suite
from heads.artifact import Draft, load_draft
from heads.lean_forward import lean_twin
from heads.proposer import Proposer

log = logging.getLogger("draftsmith")

LARGE_BATCH = 8  # the ratio `batch8_vs_batch1` bears it in its name

Requests = Sequence[Request]
Rule = Literal["token", "block", "match"]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a side made of some prompts; transformers keeps no timings by phase."""

    generations: list[Generation]
    timings: list[Timing]

    @property
    def num_tokens(self) -> int:
        """New token ids, the first of each answer included."""
        return sum(len(generation.tokens) for generation in self.generations)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A target, a draft and what they are measured on."""

    config: BenchDecodeConfig
    target: Target
    proposer: Proposer
    requests: list[Request]
    lean_target: Target | None  # the same weights, run by a lean forward; None: its family has none
    lean_proposer: Proposer | None

    def settings(self, temperature: float, verification: Rule = "token") -> DecodeConfig:
        """Return how to decode."""
        return DecodeConfig(
            num_speculative_tokens=self.config.num_speculative_tokens,
            max_new_tokens=self.config.max_new_tokens,
            temperature=temperature,
            verification=verification,
        )

    def batches(self) -> list[Requests]:
        """Return the requests in large batches, the last of which may be smaller."""
        return [self.requests[start : start + LARGE_BATCH] for start in range(0, len(self.requests), LARGE_BATCH)]

    def load_draft_for(self, target: Target) -> Draft:
        """Load the draft once more, for a target in another dtype."""
        return load_draft(self.config.draft, target.identity, target.model)


def open_bench(config: BenchDecodeConfig) -> Bench:
    """Load what is measured.

    Raises:
        InputError: the draft is not for this target, or a prompt cannot be decoded.
    """
    suite = load_suite(config.suite)
    target = load_target(config.target.model_copy(update={"forward": "transformers"}))
    draft = load_draft(config.draft, target.identity, target.model)
    lean_target, lean_proposer = _run_lean(config, target)
    requests = [
        Request(
            prompt_id=prompt.prompt_id,
            category=prompt.category,
            tokens=tuple(target.encode_chat([{"role": "user", "content": prompt.turns[0]}])),
        )
        for prompt in suite.prompts
    ]
    check_decodable(target, requests)
    return Bench(
        config=config,
        target=target,
        proposer=draft.proposer,
        requests=requests,
        lean_target=lean_target,
        lean_proposer=lean_proposer,
    )


def load_for_transformers(draft: str, target: Target) -> PreTrainedModel:
    """Load a draft LM's artifact once more, as a user of transformers does: ours may keep a part of its head only."""
    attention = target.model.config._attn_implementation
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=target.model.dtype, attn_implementation=attention)
    return move(model, target.device, target.model.dtype).eval()


def _run_lean(config: BenchDecodeConfig, target: Target) -> tuple[Target, Proposer] | tuple[None, None]:
    """Return the target and the draft by lean forwards, or nothing where the target's family has none."""
    try:
        lean_target = replace(target, model=lean_twin(target.model))
    except InputError as error:
        log.warning("lean forwards are not measured: %s", error)
        return None, None
    draft = load_draft(config.draft, target.identity, lean_target.model)
    for warning in draft.warnings:
        log.warning("%s", warning)
    return lean_target, draft.proposer

"""A few prompts decoded with a draft: does the target accept anything at all, and what does it answer?

A draft that reads other states than it was trained on, or another target's, decodes without an error and is accepted never. A
few prompts tell; how good a draft is takes an evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import decode
from eval.decoder.request import Request
from heads.proposers.protocol import Proposer
from heads.target.loading import Target


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a few prompts gave.

    Args:
        accepted_per_round: drafts that the target accepted a round, pooled; 0 where nothing was drafted.
        answers: the target's answers, ids.
    """

    accepted_per_round: float
    answers: list[tuple[int, ...]]


def probe(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int,
    max_new_tokens: int,
) -> Probe:
    """Decode prompts greedily with a draft, in one batch.

    Args:
        target: the model that judges.
        proposer: the draft.
        prompts: their ids.
        num_speculative_tokens: drafts a round.
        max_new_tokens: where an answer is cut.
    """
    config = DecodeConfig(num_speculative_tokens=num_speculative_tokens, max_new_tokens=max_new_tokens)
    requests = [Request(prompt_id=str(number), category="", tokens=tuple(tokens)) for number, tokens in enumerate(prompts)]
    generations, _ = decode(target, requests, config, proposer)
    rounds = [one.num_accepted for generation in generations for one in generation.rounds]
    return Probe(
        accepted_per_round=sum(rounds) / len(rounds) if rounds else 0.0,
        answers=[tuple(generation.tokens) for generation in generations],
    )

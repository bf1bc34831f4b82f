"""One prompt decoded with a draft: does the target accept anything at all?

A draft that reads other states than it was trained on, or another target's, decodes without an error and is accepted never. One
prompt tells; how good a draft is takes an evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.decoding import DecodeConfig
from distill.target import Target
from eval.decode import decode
from eval.rows import Request
from heads.proposer import Proposer


def accepted_per_round(
    target: Target, proposer: Proposer, tokens: Sequence[int], *, num_speculative_tokens: int, max_new_tokens: int
) -> float:
    """Return how many drafts the target accepts a round, greedily, on one prompt.

    Args:
        target: the model that judges.
        proposer: the draft.
        tokens: the prompt's ids.
        num_speculative_tokens: drafts a round.
        max_new_tokens: where the answer is cut.
    """
    config = DecodeConfig(num_speculative_tokens=num_speculative_tokens, max_new_tokens=max_new_tokens)
    request = Request(prompt_id="probe", category="", tokens=tuple(tokens))
    (generation,), _ = decode(target, [request], config, proposer)
    if not generation.rounds:
        return 0.0
    return sum(one.num_accepted for one in generation.rounds) / len(generation.rounds)

"""Tolerant verification (VADUSA, 2410.21951): a draft stays if any of several draws of the target's would have been it. LOSSY.

Speech has no one right token, and what the target draws is one of many that sound alike. So the target draws `samples` times
where token-wise rejection would refuse a draft: first the token that would take the draft's place, then tokens from p. The
draft stays if one of them is the draft itself, or, with a table, one of the codes nearest to it. With the draft's likeliest
tokens and no table this is the paper's rule: the draft stays with probability 1 - (1 - p)^samples.

Departures: no token is drawn in fact. What the draws come to is a distribution p' made of p and q alone (`tolerant`), and the
lossless rule of the settings without `lossy` then judges by p'; the token after a refusal comes from the same residual whether
or not near codes could have saved the draft. The paper knows no bound on the output's distance from p; `delta` is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from configs.schema.decoding import DecodeConfig, TolerantAcceptance
from eval.decoder.chain_rules import ChainVerification
from eval.decoder.tree_rules import CANDIDATE_RULES
from eval.decoder.verifier import RULES, Verifier
from eval.lossy.neighbourhood import fitting, read_table, step_candidates, step_rule
from heads.proposers.protocol import Proposal
from heads.sampling.counter_rng import CounterRNG


class TolerantVerifier(Verifier):
    """Verifies chains and trees by `tolerant`; the arguments are those of `eval.decoder.verifier.Verifier`.

    Raises:
        ValueError: `config.lossy` is not tolerance.
        InputError: the table cannot be read, or has fewer than k neighbours.
    """

    rules: ClassVar[frozenset[str]] = frozenset(("tolerance",))

    def __init__(self, config: DecodeConfig, rng: CounterRNG) -> None:
        super().__init__(config, rng)
        lossy, device = config.lossy, rng.requests_B.device
        if not isinstance(lossy, TolerantAcceptance):
            raise ValueError(f"lossy must be set to tolerance, got {lossy}")
        strict = config.model_copy(update={"lossy": None}).rule
        none_VN = torch.empty((0, 0), dtype=torch.int64, device=device)
        near_VN = none_VN if lossy.table is None else read_table(lossy.table, lossy.k, device)
        move = partial(tolerant, samples=lossy.samples)
        if strict in RULES:
            self.chain_rule = step_rule(RULES[strict], near_VN, lossy.delta, move)
        else:
            self.candidate_rule = step_candidates(CANDIDATE_RULES[strict], near_VN, lossy.delta, move)

    def chain(
        self, logits_BKV: Tensor, proposal: Proposal, num_drafted: Sequence[int], lengths: Sequence[int]
    ) -> ChainVerification:
        if proposal.probs_BGV is None:  # the draft's likeliest tokens, each a point mass
            proposal = replace(proposal, by_lookup=[1] * len(num_drafted))
        return super().chain(logits_BKV, proposal, num_drafted, lengths)


def tolerant(p: Tensor, q: Tensor, near_VN: Tensor, delta: float, *, samples: int) -> Tensor:
    """Return p' `[..., V]`: what follows where refused drafts stay by the target's draws.

    Token-wise rejection refuses a token with probability (q - p)+ in all, and puts one from (p - q)+ in its place. Of what is
    refused, a share comes back that is the chance that one of the draws is near; where that comes to more than delta in all, it
    is scaled down. It is taken from (p - q)+ evenly, and is TV(p', p).

    Args:
        p: the target's distributions `[..., V]`.
        q: those that the drafts were drawn from, point masses for the draft's likeliest.
        near_VN: the tokens that pass for each, besides itself; N may be 0.
        delta: the most that is moved, 0 to 1. With 0, p' is p to the bit.
        samples: draws; the first is the token that would take the draft's place.
    """
    refused, residual = (q - p).clamp(min=0), (p - q).clamp(min=0)
    tiny = torch.finfo(p.dtype).tiny
    total = residual.sum(-1, keepdim=True).clamp(min=tiny)
    by_first, by_others = torch.zeros_like(p), p  # chances that a draw is near a token; a refused one has no residual itself
    itself_V = torch.arange(p.shape[-1], device=p.device)
    for near_V in fitting(near_VN, p).unbind(1):
        other_V = near_V != itself_V
        by_first = by_first + residual[..., near_V] / total * other_V
        by_others = by_others + p[..., near_V] * other_V
    none_near = (1 - by_first).clamp(min=0) * (1 - by_others).clamp(min=0) ** (samples - 1)
    kept = refused * (1 - none_near)
    kept = kept * (delta / kept.sum(-1, keepdim=True).clamp(min=tiny)).clamp(max=1.0)
    return (p + kept - residual * (kept.sum(-1, keepdim=True) / total)).clamp(min=0)

"""Lossy verification: typical and relaxed acceptance. The output does not follow the target's distribution.

Typical acceptance (Medusa; Cai et al., 2401.10774) keeps the drafts that the target finds plausible. At temperature 0, where p
is a point mass, it is greedy decoding and lossless. The token after the path that stays is the target's likeliest, which the
paper keeps without a test; left out is drawing it.

Relaxed acceptance lets a draft stay for a token that stands for it as well: many codes of pictures and of sound are
interchangeable. Before a lossless rule judges a draft, probability is moved to it, at most `delta` in all, so that the output
follows p' in place of p with TV(p', p) <= delta.

- By neighbourhoods (LANTERN, 2410.03355) it comes from the codes nearest to the draft. `relaxed` makes p' of p and q alone. The
  paper judges each draft by a p' of its own; the output, which mixes them, may then lie further from p than delta.
- By tolerance (VADUSA, 2410.21951) a draft stays if any of several draws of the target's would have been it, or one of the
  codes nearest to it. No token is drawn in fact: `tolerant` is the distribution that the draws come to. With the draft's
  likeliest tokens and no table this is the paper's rule, in which a draft stays with probability 1 - (1 - p)^samples.
B rows, G drafts, N nodes with the root, or neighbours of a token, K = G + 1, D depth, V vocabulary; `...` leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from configs.runtime.errors import InputError, first_line
from configs.schema.decoding import DecodeConfig, NeighbourhoodAcceptance, TolerantAcceptance, TypicalAcceptance
from eval.decoder.rules import CANDIDATE_RULES, CandidateChoice, CandidateRule, ChainVerification, TreeVerification
from eval.decoder.verifier import RULES, Verifier, rooted
from heads.device import on_device, widest_float
from heads.proposers.protocol import Proposal
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.probabilities import token_probabilities
from heads.sampling.token_tree import DynamicTreeSpec, Tree

TENSOR = "neighbours"  # of the table's file: token ids [V, N], the nearest first; a token that has none names itself
ChainRule = Callable[..., ChainVerification]  # as in `eval.decoder.rules`
Move = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # as `relaxed`


class TypicalVerifier(Verifier):
    """Verifies chains and trees by typical acceptance."""

    def __init__(self, config: DecodeConfig, rng: CounterRNG) -> None:
        super().__init__(config, rng)
        lossy = cast(TypicalAcceptance, config.lossy)
        self.limits = (lossy.epsilon, lossy.delta)

    def chain(
        self, logits_BKV: Tensor, proposal: Proposal, num_drafted: Sequence[int], lengths: Sequence[int]
    ) -> ChainVerification:
        num_drafted_B = on_device(num_drafted, logits_BKV.device)
        p_BKV = token_probabilities(logits_BKV, self.config)
        return verify_typical(p_BKV, proposal.tokens_BG, num_drafted_B, *self.limits)

    def tree(
        self, logits_BKV: Tensor, proposal: Proposal, depths_BK: Tensor, lengths: Sequence[int], tree: Tree | DynamicTreeSpec
    ) -> TreeVerification:
        p_BKV = token_probabilities(logits_BKV, self.config)
        return verify_typical_tree(p_BKV, *rooted(proposal), tree.depth, *self.limits)


def typical_threshold(p: Tensor, epsilon: float, delta: float) -> Tensor:
    """Return min(epsilon, delta exp(-H(p))) `[...]` of distributions `[..., V]`: what a plausible token's probability exceeds.

    The entropy H is in nats; epsilon is below 1, at which a point mass would refuse its own token.
    """
    entropy = -torch.xlogy(p, p).sum(-1)
    return (delta * (-entropy).exp()).clamp(max=epsilon)


def verify_typical(p_BKV: Tensor, tokens_BG: Tensor, num_drafted_B: Tensor, epsilon: float, delta: float) -> ChainVerification:
    """Keep the leading drafts that are plausible, then put the target's likeliest token; a chain is a tree of one branch."""
    chain_N = torch.arange(-1, tokens_BG.shape[1], device=tokens_BG.device)
    tokens_BN = torch.nn.functional.pad(tokens_BG, (1, 0))
    parents_BN = torch.where(chain_N < num_drafted_B.unsqueeze(1), chain_N, -1)
    verdict = verify_typical_tree(p_BKV, tokens_BN, parents_BN, tokens_BG.shape[1], epsilon, delta)
    return ChainVerification(verdict.num_accepted_B, verdict.next_token_B)


def verify_typical_tree(
    p_BNV: Tensor, tokens_BN: Tensor, parents_BN: Tensor, depth: int, epsilon: float, delta: float
) -> TreeVerification:
    """Keep the deepest path of plausible tokens, the likeliest of equals, then put the target's likeliest token.

    Arguments as for `eval.decoder.rules.match_tree` and `typical_threshold`; row i of `p_BNV` comes after node i.
    """
    rows_B = torch.arange(len(p_BNV), device=p_BNV.device)
    parents_BN = parents_BN.expand_as(tokens_BN)
    above_BN = parents_BN.clamp(min=0)
    p_of_node_BN = p_BNV[rows_B.unsqueeze(1), above_BN, tokens_BN]
    plausible_BN = (p_of_node_BN > typical_threshold(p_BNV, epsilon, delta).gather(1, above_BN)) & (parents_BN >= 0)
    log_p_BN = p_of_node_BN.to(widest_float(p_of_node_BN.device)).log()
    # By node the length and the log-probability of the path to it, -1 and 0 where a node on it is not plausible.
    lengths_BN, scores_BN = torch.full_like(above_BN, -1), torch.zeros_like(log_p_BN)
    lengths_BN[:, 0] = 0
    for level in range(1, depth + 1):
        arrives_BN = plausible_BN & (lengths_BN.gather(1, above_BN) == level - 1)
        lengths_BN = torch.where(arrives_BN, level, lengths_BN)
        scores_BN = torch.where(arrives_BN, scores_BN.gather(1, above_BN) + log_p_BN, scores_BN)
    longest_B1 = lengths_BN.amax(1, keepdim=True)
    end_B = scores_BN.masked_fill(lengths_BN < longest_B1, float("-inf")).argmax(1)
    path_BD, node_B1 = parents_BN.new_full((len(end_B), depth), -1), end_B.unsqueeze(1)
    for level in reversed(range(depth)):
        on_path_B1 = longest_B1 > level
        path_BD[:, level : level + 1] = torch.where(on_path_B1, node_B1, -1)
        node_B1 = torch.where(on_path_B1, parents_BN.gather(1, node_B1), node_B1)
    return TreeVerification(path_BD, longest_B1.squeeze(1), p_BNV[rows_B, end_B].argmax(-1))


# --- relaxed acceptance -------------------------------------------------------------------------------------------


class RelaxedVerifier(Verifier):
    """Verifies by the lossless rule of the settings without `lossy`, after moving probability to the drafts.

    Neighbourhoods match drafts that come without a distribution, such as a lookup's, without loss; tolerance takes them for
    point masses.

    Raises:
        InputError: the table cannot be read, or has fewer than k neighbours.
    """

    def __init__(self, config: DecodeConfig, rng: CounterRNG) -> None:
        super().__init__(config, rng)
        lossy, device = cast(NeighbourhoodAcceptance | TolerantAcceptance, config.lossy), rng.device
        strict = config.model_copy(update={"lossy": None}).rule
        none_VN = torch.empty((0, 0), dtype=torch.int64, device=device)
        near_VN = none_VN if lossy.table is None else read_table(lossy.table, lossy.k, device)
        self.takes_point_masses = isinstance(lossy, TolerantAcceptance)
        move = partial(tolerant, samples=lossy.samples) if isinstance(lossy, TolerantAcceptance) else relaxed
        if strict in RULES:
            self.chain_rule = step_rule(RULES[strict], near_VN, lossy.delta, move)
        else:
            self.candidate_rule = step_candidates(CANDIDATE_RULES[strict], near_VN, lossy.delta, move)

    def chain(
        self, logits_BKV: Tensor, proposal: Proposal, num_drafted: Sequence[int], lengths: Sequence[int]
    ) -> ChainVerification:
        if self.takes_point_masses and proposal.probs_BGV is None:  # the draft's likeliest tokens
            proposal = replace(proposal, by_lookup=[1] * len(num_drafted))
        return super().chain(logits_BKV, proposal, num_drafted, lengths)


def relaxed(p: Tensor, q: Tensor, near_VN: Tensor, delta: float) -> Tensor:
    """Return p' `[..., V]`: p with probability moved from tokens that q drafts too rarely to near ones it drafts too often.

    The nearest give first. A token gives no more than p - q and takes no more than q - p, so what is moved in all is TV(p', p);
    where that comes to more than delta (0 to 1), every transfer is scaled down alike. With delta 0, p' is p to the bit.
    """
    spare, wanted, change = (p - q).clamp(min=0), (q - p).clamp(min=0), torch.zeros_like(p)
    for giver_V in fitting(near_VN, p).unbind(1):
        # What each would like of its neighbour, which may be that of several; they share what it has.
        asked = torch.minimum(wanted, spare[..., giver_V])
        asked_of = torch.zeros_like(p).index_add_(-1, giver_V, asked)
        share = (spare / asked_of.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1.0)
        taken, given = asked * share[..., giver_V], asked_of * share
        spare, wanted, change = (spare - given).clamp(min=0), wanted - taken, change + taken - given
    moved = change.clamp(min=0).sum(-1, keepdim=True)
    scale = (delta / moved.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1.0)
    return (p + scale * change).clamp(min=0)


def tolerant(p: Tensor, q: Tensor, near_VN: Tensor, delta: float, *, samples: int) -> Tensor:
    """Return p' `[..., V]`: what follows where refused drafts stay by the target's draws.

    Token-wise rejection refuses a token with probability (q - p)+ in all, and puts one from (p - q)+ in its place. Of what is
    refused, a share comes back that is the chance that one of the draws is near; where that comes to more than delta in all, it
    is scaled down. It is taken from (p - q)+ evenly, and is TV(p', p). The draft's likeliest tokens have point masses as q, and
    the first of the draws is the token that would take a draft's place.
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


def step_rule(rule: ChainRule, near_VN: Tensor, delta: float, move: Move = relaxed) -> ChainRule:
    """Return a rule for chains with `move` before it."""

    def verify(p_BKV: Tensor, q_BGV: Tensor, tokens_BG: Tensor, num_drafted_B: Tensor, *uniforms: Tensor) -> ChainVerification:
        moved_BGV = move(p_BKV[:, :-1], q_BGV, near_VN, delta)
        drafted_BG = torch.arange(moved_BGV.shape[1], device=p_BKV.device) < num_drafted_B.unsqueeze(1)
        moved_BGV = torch.where(drafted_BG.unsqueeze(2), moved_BGV, p_BKV[:, :-1])
        return rule(torch.cat([moved_BGV, p_BKV[:, -1:]], 1), q_BGV, tokens_BG, num_drafted_B, *uniforms)

    return verify


def step_candidates(rule: CandidateRule, near_VN: Tensor, delta: float, move: Move = relaxed) -> CandidateRule:
    """Return a rule for several candidates with `move` before it; rows without a candidate keep their p."""

    def choose(p_BV: Tensor, q_BV: Tensor, tokens_BC: Tensor, num_candidates_B: Tensor, accept_BC: Tensor) -> CandidateChoice:
        judged_B1 = (num_candidates_B > 0).unsqueeze(1)
        p_BV = torch.where(judged_B1, move(p_BV, q_BV, near_VN, delta), p_BV)
        return rule(p_BV, q_BV, tokens_BC, num_candidates_B, accept_BC)

    return choose


def fitting(near_VN: Tensor, p: Tensor) -> Tensor:
    """Return the table with rows for the padding behind the vocabulary, if the target has some; refuse one of another size."""
    missing = p.shape[-1] - len(near_VN)
    if missing < 0:
        raise InputError(
            f"decode.lossy.table names the neighbours of {len(near_VN)} tokens, and the target has {p.shape[-1]}; make "
            "it with the target's vocab_size"
        )
    if not missing:
        return near_VN
    own_M1 = torch.arange(len(near_VN), p.shape[-1], device=p.device).unsqueeze(1)
    return torch.cat([near_VN, own_M1.expand(-1, near_VN.shape[1])])


@lru_cache(maxsize=8)
def read_table(path: str, k: int, device: torch.device) -> Tensor:
    """Return the k nearest of each token in a table's file, `[V, k]`."""
    remedy = "make one with eval/neighbours.py"
    try:
        table_VN = load_file(path)[TENSOR]
    except (OSError, SafetensorError, KeyError) as error:
        raise InputError(f"decode.lossy.table: {path} holds no table of neighbours: {first_line(error)}; {remedy}") from error
    if table_VN.ndim != 2 or table_VN.dtype != torch.int64 or not ((table_VN >= 0) & (table_VN < len(table_VN))).all():
        raise InputError(f"decode.lossy.table: {Path(path).name} must hold token ids [vocabulary, neighbours]; {remedy}")
    if k > table_VN.shape[1]:
        raise InputError(f"decode.lossy.k is {k}, and {path} has {table_VN.shape[1]} neighbours of each token; {remedy}")
    return table_VN[:, :k].to(device)

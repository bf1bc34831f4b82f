"""Lossy verification: typical and relaxed acceptance. The output does not follow the target's distribution.

Typical acceptance (Medusa; Cai et al., 2401.10774) keeps the drafts that the target finds plausible. At temperature 0, where p
is a point mass, it is greedy decoding and lossless. The token after the path that stays is the target's likeliest, which the
paper keeps without a test; left out is drawing it.

Relaxed acceptance (LANTERN, 2410.03355) lets a draft stay for a token that stands for it as well: many codes of pictures and of
sound are interchangeable. Before a lossless rule judges a draft, probability is moved to it from the codes nearest to it, at
most `delta` in all, so that the output follows p' in place of p with TV(p', p) <= delta. `relaxed` makes p' of p and q alone.
The paper judges each draft by a p' of its own; the output, which mixes them, may then lie further from p than delta.
B rows, G drafts, N nodes with the root, or neighbours of a token, K = G + 1, D depth, V vocabulary; `...` leading dimensions.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from configs.runtime.errors import InputError, first_line
from configs.schema.decoding import NeighbourhoodAcceptance, TypicalAcceptance
from eval.decoder.rules import CandidateChoice, CandidateRule, ChainRule, ChainVerification, TreeVerification
from heads.device import widest_float

AT_ONCE = 4096  # codes whose distances to all others are held at a time


def typical_threshold(p: Tensor, limits: TypicalAcceptance) -> Tensor:
    """Return min(epsilon, delta exp(-H(p))) `[...]` of distributions `[..., V]`: what a plausible token's probability exceeds.

    The entropy H is in nats; epsilon is below 1, at which a point mass would refuse its own token.
    """
    entropy = -torch.xlogy(p, p).sum(-1)
    return (limits.delta * (-entropy).exp()).clamp(max=limits.epsilon)


def verify_typical(p_BKV: Tensor, tokens_BG: Tensor, num_drafted_B: Tensor, limits: TypicalAcceptance) -> ChainVerification:
    """Keep the leading drafts that are plausible, then put the target's likeliest token; a chain is a tree of one branch."""
    chain_N = torch.arange(-1, tokens_BG.shape[1], device=tokens_BG.device)
    tokens_BN = torch.nn.functional.pad(tokens_BG, (1, 0))
    parents_BN = torch.where(chain_N < num_drafted_B.unsqueeze(1), chain_N, -1)
    verdict = verify_typical_tree(p_BKV, tokens_BN, parents_BN, tokens_BG.shape[1], limits)
    return ChainVerification(verdict.num_accepted_B, verdict.next_token_B)


def verify_typical_tree(
    p_BNV: Tensor, tokens_BN: Tensor, parents_BN: Tensor, depth: int, limits: TypicalAcceptance
) -> TreeVerification:
    """Keep the deepest path of plausible tokens, the likeliest of equals, then put the target's likeliest token.

    Arguments as for `eval.decoder.rules.match_tree` and `typical_threshold`; row i of `p_BNV` comes after node i.
    """
    rows_B = torch.arange(len(p_BNV), device=p_BNV.device)
    parents_BN = parents_BN.expand_as(tokens_BN)
    above_BN = parents_BN.clamp(min=0)
    p_of_node_BN = p_BNV[rows_B.unsqueeze(1), above_BN, tokens_BN]
    plausible_BN = (p_of_node_BN > typical_threshold(p_BNV, limits).gather(1, above_BN)) & (parents_BN >= 0)
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


def relaxed(p: Tensor, q: Tensor, near_VN: Tensor, delta: float) -> Tensor:
    """Return p' `[..., V]`: p with probability moved from tokens that q drafts too rarely to near ones it drafts too often.

    The nearest give first. A token gives no more than p - q and takes no more than q - p, so what is moved in all is TV(p', p);
    where that comes to more than delta (0 to 1), every transfer is scaled down alike. With delta 0, p' is p to the bit.
    """
    spare, wanted, change = (p - q).clamp(min=0), (q - p).clamp(min=0), torch.zeros_like(p)
    for giver_V in near_VN.unbind(1):
        # What each would like of its neighbour, which may be that of several; they share what it has.
        asked = torch.minimum(wanted, spare[..., giver_V])
        asked_of = torch.zeros_like(p).index_add_(-1, giver_V, asked)
        share = (spare / asked_of.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1.0)
        taken, given = asked * share[..., giver_V], asked_of * share
        spare, wanted, change = (spare - given).clamp(min=0), wanted - taken, change + taken - given
    moved = change.clamp(min=0).sum(-1, keepdim=True)
    scale = (delta / moved.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1.0)
    return (p + scale * change).clamp(min=0)


def relaxed_chain(rule: ChainRule, lossy: NeighbourhoodAcceptance) -> ChainRule:
    """Return a rule for chains that judges by `relaxed` probabilities."""

    def verify(p_BKV: Tensor, q_BGV: Tensor, tokens_BG: Tensor, num_drafted_B: Tensor, *uniforms: Tensor) -> ChainVerification:
        moved_BGV = relaxed(p_BKV[:, :-1], q_BGV, neighbours(lossy, p_BKV.shape[-1], p_BKV.device), lossy.delta)
        drafted_BG = torch.arange(moved_BGV.shape[1], device=p_BKV.device) < num_drafted_B.unsqueeze(1)
        moved_BGV = torch.where(drafted_BG.unsqueeze(2), moved_BGV, p_BKV[:, :-1])
        return rule(torch.cat([moved_BGV, p_BKV[:, -1:]], 1), q_BGV, tokens_BG, num_drafted_B, *uniforms)

    return verify


def relaxed_candidates(rule: CandidateRule, lossy: NeighbourhoodAcceptance) -> CandidateRule:
    """Return a rule for several candidates that judges by `relaxed` probabilities; rows without a candidate keep their p."""

    def choose(p_BV: Tensor, q_BV: Tensor, tokens_BC: Tensor, num_candidates_B: Tensor, accept_BC: Tensor) -> CandidateChoice:
        moved_BV = relaxed(p_BV, q_BV, neighbours(lossy, p_BV.shape[-1], p_BV.device), lossy.delta)
        p_BV = torch.where((num_candidates_B > 0).unsqueeze(1), moved_BV, p_BV)
        return rule(p_BV, q_BV, tokens_BC, num_candidates_B, accept_BC)

    return choose


@lru_cache(maxsize=8)
def neighbours(lossy: NeighbourhoodAcceptance, vocab_size: int, device: torch.device) -> Tensor:
    """Return the ids of the codes nearest to each token, `[V, k]`, the nearest first; tokens that are no codes name themselves.

    Raises:
        InputError: the codebook cannot be read, does not fit the vocabulary, or has too few codes.
    """
    codebook_CE, k, first = _read_codebook(lossy).double(), lossy.k, lossy.first_id
    if first + len(codebook_CE) > vocab_size:
        raise InputError(
            f"decode.lossy.codebook: {len(codebook_CE)} codes from token {first} on do not fit a vocabulary of {vocab_size}"
        )
    if k >= len(codebook_CE):
        raise InputError(f"decode.lossy.k must be less than the codebook's {len(codebook_CE)} codes, got {k}")
    near_VN = torch.arange(vocab_size).unsqueeze(1).repeat(1, k)
    for own_P in torch.arange(len(codebook_CE)).split(AT_ONCE):
        distances_PC = torch.cdist(codebook_CE[own_P], codebook_CE)
        distances_PC[torch.arange(len(own_P)), own_P] = float("inf")
        near_VN[first + own_P] = first + distances_PC.topk(k, largest=False).indices
    return near_VN.to(device)


def _read_codebook(lossy: NeighbourhoodAcceptance) -> Tensor:
    try:
        codebook = torch.from_numpy(np.load(lossy.codebook, allow_pickle=False))
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise InputError(f"decode.lossy.codebook: {lossy.codebook} cannot be read: {first_line(error)}") from error
    if codebook.ndim != 2 or not codebook.is_floating_point() or not torch.isfinite(codebook).all():
        raise InputError(f"decode.lossy.codebook must hold finite numbers [codes, width], got {tuple(codebook.shape)}")
    return codebook

"""Verification rules for a chain of drafted tokens: how many stay, and which token comes after them.

Pure functions of (p, q, tokens, uniforms); that their output follows the target's distribution is shown by exact enumeration
(`tests.support.enumeration`). Row i of the K = G + 1 target rows is for draft i, row G for the bonus token. Rows of a batch
may hold fewer drafts than G (`num_drafted_B`); what lies beyond is never read. B batch, G drafts, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from heads.device import widest_float
from heads.sampling.probabilities import draw, values_at


class ChainVerification(NamedTuple):
    """`num_accepted_B` drafts stay (0..num_drafted), then comes `next_token_B`, from the target."""

    num_accepted_B: Tensor
    next_token_B: Tensor


def verify_greedy(target_tokens_BK: Tensor, tokens_BG: Tensor, num_drafted_B: Tensor) -> ChainVerification:
    """Keep drafts while they equal the target's own tokens.

    With the target's greedy choices as `target_tokens_BK` this is greedy decoding. With draws from the target's distribution
    it is sample-and-match: lossless for any deterministic proposal, and the output is equal to that of plain decoding with the
    same stream.
    """
    matches_BG = (target_tokens_BK[:, :-1] == tokens_BG) & _drafted(tokens_BG, num_drafted_B)
    num_accepted_B = _leading(matches_BG)
    return ChainVerification(num_accepted_B, values_at(target_tokens_BK, num_accepted_B))


def verify_tokens(
    p_BKV: Tensor,
    q_BGV: Tensor,
    tokens_BG: Tensor,
    num_drafted_B: Tensor,
    accept_BG: Tensor,
    residual_B: Tensor,
    bonus_B: Tensor,
) -> ChainVerification:
    """Token-wise rejection sampling (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

    Draft i stays with probability min(1, p_i/q_i); after the first rejection the token comes from the normalised positive part
    of p - q, after none from p. Lossless for any q the drafts were truly drawn from.

    Args:
        p_BKV: the target's distribution after each prefix, K = G + 1.
        q_BGV: the distribution each draft was drawn from; a point mass for a deterministic draft.
        tokens_BG: the drafts.
        num_drafted_B: drafts that count in each row.
        accept_BG, residual_B, bonus_B: independent uniforms in [0, 1) for acceptance, residual and bonus draws.
    """
    p_of_draft_BG, q_of_draft_BG = values_at(p_BKV[:, :-1], tokens_BG), values_at(q_BGV, tokens_BG)
    stays_BG = (accept_BG * q_of_draft_BG < p_of_draft_BG) & _drafted(tokens_BG, num_drafted_B)
    weight_B = torch.ones_like(residual_B)
    return _finish(p_BKV, q_BGV, _leading(stays_BG), num_drafted_B, weight_B, residual_B, bonus_B)


def verify_block(
    p_BKV: Tensor,
    q_BGV: Tensor,
    tokens_BG: Tensor,
    num_drafted_B: Tensor,
    accept_BG: Tensor,
    residual_B: Tensor,
    bonus_B: Tensor,
) -> ChainVerification:
    """Block verification (Sun et al., 2403.10444): test the drafts together; never fewer expected tokens than token-wise.

    With P_0 = 1 and P_i = min(1, P_{i-1} p_i/q_i), a prefix of i < g drafts passes its test with probability
    R_i / (R_i + 1 - P_i), R_i = sum_v (P_i p_{i+1}(v) - q_{i+1}(v))+, the whole block with P_g; the longest prefix that
    passes stays. The next token comes from the normalised positive part of P_a p_{a+1} - q_{a+1}, after a whole block from p.

    Args: as for `verify_tokens`; `accept_BG[:, i]` decides about the prefix that ends with draft i.
    """
    wide = widest_float(p_BKV.device)
    ratio_BG = values_at(p_BKV[:, :-1], tokens_BG).to(wide) / values_at(q_BGV, tokens_BG).to(wide)
    prefix_BK = [torch.ones_like(ratio_BG[:, 0])]
    for ratio_B in ratio_BG.unbind(1):
        prefix_BK.append((prefix_BK[-1] * ratio_B).clamp(max=1.0))
    P_BK = torch.stack(prefix_BK, 1)
    # R for prefixes 1..G-1, which are followed by another draft; the last column is not used as such.
    R_BG = (P_BK[:, 1:-1, None] * p_BKV[:, 1:-1] - q_BGV[:, 1:]).clamp(min=0).sum(-1).to(wide)
    open_BG = R_BG / (R_BG + 1 - P_BK[:, 1:-1]).clamp(min=torch.finfo(wide).tiny)
    keep_BG = torch.cat([open_BG, P_BK[:, -1:]], 1)
    length_G = torch.arange(1, tokens_BG.shape[1] + 1, device=tokens_BG.device)
    whole_BG = length_G == num_drafted_B.unsqueeze(1)
    keep_BG = torch.where(whole_BG, P_BK[:, 1:], keep_BG)
    wins_BG = (accept_BG < keep_BG) & _drafted(tokens_BG, num_drafted_B)
    num_accepted_B = (wins_BG * length_G).amax(1)
    return _finish(p_BKV, q_BGV, num_accepted_B, num_drafted_B, values_at(P_BK, num_accepted_B), residual_B, bonus_B)


def _finish(
    p_BKV: Tensor,
    q_BGV: Tensor,
    num_accepted_B: Tensor,
    num_drafted_B: Tensor,
    weight_B: Tensor,
    residual_B: Tensor,
    bonus_B: Tensor,
) -> ChainVerification:
    """Draw the token after `num_accepted_B` drafts: from p where all stayed, else from (weight * p - q)+."""
    all_stayed_B = num_accepted_B == num_drafted_B
    rows_B = torch.arange(len(num_accepted_B), device=num_accepted_B.device)
    p_BV = p_BKV[rows_B, num_accepted_B]
    q_BV = q_BGV[rows_B, num_accepted_B.clamp(max=q_BGV.shape[1] - 1)]
    rest_BV = (weight_B.unsqueeze(1) * p_BV - q_BV).clamp(min=0)
    # p = q up to rounding leaves no residual; a rejection then has probability 0 up to rounding, and p itself is right.
    from_p_B = all_stayed_B | (rest_BV.sum(-1) == 0)
    weights_BV = torch.where(from_p_B.unsqueeze(1), p_BV.to(rest_BV.dtype), rest_BV)
    return ChainVerification(num_accepted_B, draw(weights_BV, torch.where(all_stayed_B, bonus_B, residual_B)))


def _drafted(tokens_BG: Tensor, num_drafted_B: Tensor) -> Tensor:
    return torch.arange(tokens_BG.shape[1], device=tokens_BG.device) < num_drafted_B.unsqueeze(1)


def _leading(flags_BG: Tensor) -> Tensor:
    """Count the leading True values of each row."""
    return flags_BG.long().cumprod(1).sum(1)

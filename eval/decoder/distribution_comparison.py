"""How close the target's and the draft's distributions are at every drafted position, exact from their logits.

Low in variance, because nothing is drawn. Which positions are compared follows from the drafts: those of longer rounds stand
behind more drafted tokens. `eval.decoder.batch` calls this where the overlap is measured, and counts the time apart. Drafts
without logits, such as copied text, are not compared.
B batch, G drafts, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from configs.schema.decoding import SamplingConfig
from heads.proposers.chain_builder import confidence
from heads.sampling.probabilities import token_probabilities, values_at


class PositionComparison(NamedTuple):
    """Each float32; `p` is the target's distribution and `q` the draft's, after the same tokens."""

    # sum_v min(p, q) = 1 - TV(p, q) of the distributions in use: the chance that a draft is kept (2211.17192, corollary 3.6).
    # At temperature 0 both are one-hot: 1 where the likeliest tokens agree, else 0
    overlap_BG: Tensor
    kl_BG: Tensor  # KL(p || q) in nats, over the tokens of the draft's vocabulary, with p renormalised there
    uncovered_BG: Tensor  # the mass of p outside the draft's vocabulary, where KL(p || q) would be infinite
    agrees_BG: Tensor  # 1 where both have the same likeliest token, else 0
    confidence_BG: Tensor  # q of the drafted token
    target_probability_BG: Tensor  # p of the drafted token
    distribution_confidence_BG: Tensor  # the largest probability of q, which stopping rules read


def compare_distributions(
    p_logits_BGV: Tensor, q_logits_BGV: Tensor, tokens_BG: Tensor, sampling: SamplingConfig
) -> PositionComparison:
    """Compare two distributions at each drafted position. Where a draft's logits are not finite, overlap and mass are 0.

    Args:
        p_logits_BGV: the target's logits; row i predicts draft i.
        q_logits_BGV: the draft's, for the same or fewer tokens; `-inf` outside its vocabulary.
        tokens_BG: the drafts, ids of the target.
        sampling: the distribution in use. Confidences, probabilities of tokens and KL of temperature 0 are those at temperature
            1. KL is taken before top-k and top-p, which would make it infinite; everything else after.
    """
    missing = p_logits_BGV.shape[-1] - q_logits_BGV.shape[-1]
    q_logits_BGV = torch.nn.functional.pad(q_logits_BGV.float(), (0, missing), value=float("-inf"))
    is_greedy = sampling.temperature == 0
    if is_greedy:
        sampling = sampling.model_copy(update={"temperature": 1.0})
    p_BGV = token_probabilities(p_logits_BGV, sampling)
    q_BGV = token_probabilities(q_logits_BGV, sampling).nan_to_num(0.0)
    kl_BG, uncovered_BG = _divergence(p_logits_BGV.float(), q_logits_BGV, sampling.temperature)
    agrees_BG = (p_logits_BGV.argmax(-1) == q_logits_BGV.nan_to_num(float("-inf")).argmax(-1)).float()
    return PositionComparison(
        overlap_BG=agrees_BG if is_greedy else torch.minimum(p_BGV, q_BGV).sum(-1).nan_to_num(0.0),
        kl_BG=kl_BG,
        uncovered_BG=uncovered_BG,
        agrees_BG=agrees_BG,
        confidence_BG=values_at(q_BGV, tokens_BG),
        target_probability_BG=values_at(p_BGV, tokens_BG).nan_to_num(0.0),
        distribution_confidence_BG=confidence(q_BGV),
    )


def _divergence(p_logits_BGV: Tensor, q_logits_BGV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return KL(p || q) over the tokens that q covers, and the mass of p on the others; logarithms cannot underflow."""
    covered_BGV = torch.isfinite(q_logits_BGV)
    log_p_BGV = (p_logits_BGV / temperature).log_softmax(-1)
    log_q_BGV = (q_logits_BGV.masked_fill(~covered_BGV, float("-inf")) / temperature).log_softmax(-1)
    p_BGV = log_p_BGV.exp().masked_fill(~covered_BGV, 0.0)
    mass_BG = p_BGV.sum(-1)
    terms_BGV = torch.where(covered_BGV, p_BGV * (log_p_BGV - log_q_BGV), 0.0)
    # sum_S p/m (log p/m - log q) = (sum_S p (log p - log q)) / m - log m; rounding may leave a little below zero.
    kl_BG = (terms_BGV.sum(-1) / mass_BG - mass_BG.log()).clamp(min=0.0)
    return kl_BG.nan_to_num(0.0, posinf=0.0), (1.0 - mass_BG).clamp(min=0.0).nan_to_num(1.0)

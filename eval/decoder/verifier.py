"""From the target's logits and a proposal to how many drafts stay and which token comes next.

`Verifier` picks the verification rule in force (`eval.decoder.rules`) and the random numbers that it decides by.
`compare_distributions` says how close the two distributions were at the drafts.
B batch, G drafts of a chain, N of a tree, K = G + 1 or N + 1 target rows, D depth of a tree, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from configs.schema.decoding import DecodeConfig, SamplingConfig
from eval.decoder.rules import (
    CANDIDATE_RULES,
    ChainVerification,
    TreeVerification,
    match_tree,
    verify_block,
    verify_greedy,
    verify_tokens,
    verify_tree,
    without_replacement,
)
from heads.device import RowInts
from heads.proposers.protocol import Proposal, RoundInputs
from heads.sampling.draws import ChainUniforms, Role, draw, greedy_token, token_probabilities, values_at
from heads.sampling.token_tree import DynamicTreeSpec, Tree, distinct_positions

RULES: dict[str, Callable[..., ChainVerification]] = {"token": verify_tokens, "block": verify_block}


class Verifier:
    """Verifies proposals; the output follows the target's distribution."""

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config
        # None: drafts are matched with the target's own tokens.
        self.chain_rule, self.candidate_rule = RULES.get(config.rule), CANDIDATE_RULES.get(config.rule)

    def chain(self, logits_BKV: Tensor, proposal: Proposal, num_drafted: RowInts, inputs: RoundInputs) -> ChainVerification:
        """Apply the rule to a chain, of which `num_drafted` drafts count by row.

        Row i of the logits predicts the token at position (the row's length + i).
        """
        num_drafted_B, G, rule = num_drafted.tensor_B, proposal.tokens_BG.shape[1], self.chain_rule
        if rule is None or proposal.probs_BGV is None:
            return verify_greedy(self.target_tokens(logits_BKV, inputs), proposal.tokens_BG, num_drafted_B)
        q_BGV = _pad_vocabulary(proposal.probs_BGV, logits_BKV)
        p_BKV = token_probabilities(logits_BKV, self.config)
        numbers = cast(ChainUniforms, inputs.uniforms)
        residual_B, bonus_B = numbers.residual_B1.squeeze(1), values_at(numbers.target_BK, num_drafted_B)
        return rule(p_BKV, q_BGV, proposal.tokens_BG, num_drafted_B, numbers.accept_BG[:, :G], residual_B, bonus_B)

    def tree(
        self, logits_BKV: Tensor, proposal: Proposal, depths_BK: Tensor, inputs: RoundInputs, tree: Tree | DynamicTreeSpec
    ) -> TreeVerification:
        """Apply the rule to the tree that was asked for; the path that stays names rows, so draft i as i + 1.

        Row k of the logits predicts the token at position (the row's length + depth of k), 0 the depth of the pending token.
        """
        tokens_BK, parents_BK = rooted(proposal)
        depth = tree.depth
        if self.config.temperature == 0:
            greedy_BK = greedy_token(logits_BKV)
            return match_tree(lambda node_B, _: values_at(greedy_BK, node_B), tokens_BK, parents_BK, depth)
        rows_B = torch.arange(len(tokens_BK), device=tokens_BK.device)
        first_B1 = inputs.lengths.tensor_B.unsqueeze(1)
        probs_BKV = None if self.candidate_rule is None else proposal.probs_BKV
        return verify_tree(
            lambda node_B: token_probabilities(logits_BKV[rows_B, node_B], self.config),
            None if probs_BKV is None else _pad_vocabulary(probs_BKV, logits_BKV),
            tokens_BK,
            parents_BK,
            inputs.rng.uniform(Role.ACCEPT, distinct_positions(first_B1 + depths_BK - 1), first_B1),
            inputs.rng.uniform(Role.TARGET, first_B1 + torch.arange(depth + 1, device=tokens_BK.device)),
            width=tree.width,
            rule=self.candidate_rule or without_replacement,
        )

    def target_tokens(self, logits_BKV: Tensor, inputs: RoundInputs) -> Tensor:
        """Return the target's own tokens `[B, K]` after the text: its greedy choices, or draws by its own random numbers."""
        if self.config.temperature == 0:
            return greedy_token(logits_BKV)
        uniform_BK = cast(ChainUniforms, inputs.uniforms).target_BK[:, : logits_BKV.shape[1]]
        return draw(token_probabilities(logits_BKV, self.config), uniform_BK)


def finite_rows(logits_BKV: Tensor, proposal: Proposal) -> Tensor:
    """Return which rows have finite logits and, where drafts have a distribution, a finite one; bool `[B]`."""
    finite_B = torch.isfinite(logits_BKV.amax((1, 2)))
    distributions = proposal.probs_BGV if proposal.probs_BKV is None else proposal.probs_BKV
    if distributions is not None:  # neither drafts nor residuals can be drawn from a distribution that is not finite
        finite_B &= torch.isfinite(distributions.sum((1, 2)))
    return finite_B


def rooted(proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Return tokens and parents `[B, N + 1]` of a proposed tree with the pending token as root in column 0."""
    if proposal.parents_BN is None:
        raise ValueError("the proposal is a chain")
    return functional.pad(proposal.tokens_BG, (1, 0)), functional.pad(proposal.parents_BN, (1, 0), value=-1)


def _pad_vocabulary(q_BGV: Tensor, like_BKV: Tensor, value: float = 0.0) -> Tensor:
    """Pad what a draft says of its reduced vocabulary to the target's."""
    missing = like_BKV.shape[-1] - q_BGV.shape[-1]
    return functional.pad(q_BGV, (0, missing), value=value) if missing else q_BGV


def compare_distributions(p_logits_BGV: Tensor, q_logits_BGV: Tensor, sampling: SamplingConfig) -> Tensor:
    """Compare the target's distributions (p) and the draft's (q) at each draft, exact from their logits.

    KL of temperature 0 is that at temperature 1. It is taken before top-k and top-p, which would make it infinite; the overlap
    after. Where a draft's logits are not finite, overlap and mass are 0. The draft's logits may be of fewer tokens than the
    target's, and are -inf outside its vocabulary. Returns float32 `[B, G, 4]`: the overlap, then the numbers of
    `eval.decoder.records.DistributionComparison`.
    """
    q_logits_BGV = _pad_vocabulary(q_logits_BGV.float(), p_logits_BGV, float("-inf"))
    overlap_BG = agrees_BG = (p_logits_BGV.argmax(-1) == q_logits_BGV.nan_to_num(float("-inf")).argmax(-1)).float()
    if sampling.temperature > 0:
        p_BGV, q_BGV = token_probabilities(p_logits_BGV, sampling), token_probabilities(q_logits_BGV, sampling)
        overlap_BG = torch.minimum(p_BGV, q_BGV.nan_to_num(0.0)).sum(-1).nan_to_num(0.0)
    kl_BG, uncovered_BG = _divergence(p_logits_BGV.float(), q_logits_BGV, sampling.temperature or 1.0)
    return torch.stack([overlap_BG, kl_BG, uncovered_BG, agrees_BG], -1)


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

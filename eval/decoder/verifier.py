"""From the target's logits and a proposal to how many drafts stay and which token comes next.

`Verifier` picks the verification rule in force (`eval.decoder.rules`, `eval.decoder.lossy`) and the random numbers that it
decides by. `compare_distributions` says how close the two distributions were at the drafts.
B batch, G drafts of a chain, N of a tree, K = G + 1 or N + 1 target rows, D depth of a tree, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from configs.schema.decoding import DecodeConfig, NeighbourhoodAcceptance, TypicalAcceptance
from eval.decoder.lossy import (
    neighbours,
    relaxed,
    relaxed_candidates,
    relaxed_chain,
    typical_threshold,
    verify_typical,
    verify_typical_tree,
)
from eval.decoder.rules import (
    CANDIDATE_RULES,
    CHAIN_RULES,
    ChainVerification,
    TreeVerification,
    match_tree,
    verify_greedy,
    verify_tree,
)
from heads.device import RowInts
from heads.proposers.protocol import Proposal, RoundInputs
from heads.sampling.draws import ChainUniforms, Role, draw, greedy_token, token_probabilities, values_at
from heads.sampling.token_tree import DynamicTreeSpec, Tree, distinct_positions


class Verifier:
    """Verifies proposals; the output follows the target's distribution unless `config.lossy` is set.

    Drafts of a one-hot q, the draft's likeliest tokens or a lookup's, are matched with the target's own tokens
    (`eval.decoder.rules.verify_greedy`).
    """

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config
        self.typical = config.lossy if isinstance(config.lossy, TypicalAcceptance) else None
        near = config.lossy if isinstance(config.lossy, NeighbourhoodAcceptance) else None
        rule = config.lossless_rule
        self.chain_rule, self.candidate_rule = CHAIN_RULES.get(rule), CANDIDATE_RULES.get(rule)
        if near is not None:
            self.chain_rule = self.chain_rule and relaxed_chain(self.chain_rule, near)
            self.candidate_rule = self.candidate_rule and relaxed_candidates(self.candidate_rule, near)

    def chain(self, logits_BKV: Tensor, proposal: Proposal, num_drafted: RowInts, inputs: RoundInputs) -> ChainVerification:
        """Apply the rule to a chain, of which `num_drafted` drafts count by row.

        Row i of the logits predicts the token at position (the row's length + i).
        """
        num_drafted_B, G, rule = num_drafted.tensor_B, proposal.tokens_BG.shape[1], self.chain_rule
        if self.typical is not None:
            return verify_typical(token_probabilities(logits_BKV, self.config), proposal.tokens_BG, num_drafted_B, self.typical)
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
        if proposal.parents_BN is None:
            raise ValueError("the proposal is a chain")
        # The pending token is the root, in column 0.
        tokens_BK = functional.pad(proposal.tokens_BG, (1, 0))
        parents_BK = functional.pad(proposal.parents_BN, (1, 0), value=-1)
        depth = tree.depth
        if self.config.temperature == 0:
            greedy_BK = greedy_token(logits_BKV)
            return match_tree(lambda node_B, _: values_at(greedy_BK, node_B), tokens_BK, parents_BK, depth)
        if self.typical is not None:
            return verify_typical_tree(token_probabilities(logits_BKV, self.config), tokens_BK, parents_BK, depth, self.typical)
        rows_B = torch.arange(len(tokens_BK), device=tokens_BK.device)
        first_B1 = inputs.lengths.tensor_B.unsqueeze(1)
        next_BK = inputs.rng.uniform(Role.TARGET, first_B1 + torch.arange(depth + 1, device=tokens_BK.device))

        def p_after(node_B: Tensor) -> Tensor:
            return token_probabilities(logits_BKV[rows_B, node_B], self.config)

        if self.candidate_rule is None or proposal.probs_BKV is None:
            return match_tree(lambda node_B, level: draw(p_after(node_B), next_BK[:, level]), tokens_BK, parents_BK, depth)
        return verify_tree(
            p_after,
            _pad_vocabulary(proposal.probs_BKV, logits_BKV),
            tokens_BK,
            parents_BK,
            inputs.rng.uniform(Role.ACCEPT, distinct_positions(first_B1 + depths_BK - 1), first_B1),
            next_BK,
            width=tree.width,
            rule=self.candidate_rule,
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


def _pad_vocabulary(q_BGV: Tensor, like_BKV: Tensor, value: float = 0.0) -> Tensor:
    """Pad what a draft says of its reduced vocabulary to the target's."""
    missing = like_BKV.shape[-1] - q_BGV.shape[-1]
    return functional.pad(q_BGV, (0, missing), value=value) if missing else q_BGV


def compare_distributions(p_logits_BGV: Tensor, q_logits_BGV: Tensor, tokens_BG: Tensor, config: DecodeConfig) -> Tensor:
    """Compare the target's distributions (p) and the draft's (q) at each draft, exact from their logits.

    Returns float32 `[B, G, 2]`: the overlap, the chance that a draft at this place is kept, and the mass of p outside
    the draft's vocabulary, before top-k, top-p and min-p (at temperature 0 that of temperature 1). The chance is after these
    sum_v min(p, q) where drafts are drawn, of p as `lossy` moves it; p of the draft where that is the draft's likeliest token;
    under typical acceptance whether the draft is plausible. A draft's logits may be of fewer tokens than the target's, and are
    -inf outside its vocabulary; where they are not finite, the overlap is 0.
    """
    q_logits_BGV, lossy = _pad_vocabulary(q_logits_BGV.float(), p_logits_BGV, float("-inf")), config.lossy
    p_BGV = token_probabilities(p_logits_BGV, config)
    overlap_BG = values_at(p_BGV, tokens_BG)
    if config.draws:
        q_BGV = token_probabilities(q_logits_BGV, config)
        if isinstance(lossy, NeighbourhoodAcceptance):
            p_BGV = relaxed(p_BGV, q_BGV, neighbours(lossy, p_BGV.shape[-1], p_BGV.device), lossy.delta)
        overlap_BG = torch.minimum(p_BGV, q_BGV).sum(-1)
    elif isinstance(lossy, TypicalAcceptance) and config.temperature > 0:
        overlap_BG = (overlap_BG > typical_threshold(p_BGV, lossy)).float()
    overlap_BG = overlap_BG.masked_fill(~torch.isfinite(q_logits_BGV.amax(-1)), 0.0).nan_to_num(0.0)
    probs_BGV = (p_logits_BGV.float() / (config.temperature or 1.0)).softmax(-1)
    mass_BG = probs_BGV.masked_fill(~torch.isfinite(q_logits_BGV), 0.0).sum(-1)
    return torch.stack([overlap_BG, (1.0 - mass_BG).clamp(min=0.0).nan_to_num(1.0)], -1)

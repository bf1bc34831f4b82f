"""Typical acceptance: keep the drafts that the target finds plausible. LOSSY: the output does not follow its distribution.

The rule of Medusa (Cai et al., 2401.10774) as pure functions over (p, tokens), and the `Verifier` that applies it. At
temperature 0, where p is a point mass, it is greedy decoding and lossless. The token after the path that stays is the
target's likeliest, which the paper keeps without a test; left out is drawing it.
B rows, G drafts, N nodes with the root, K = G + 1, D depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from configs.schema.decoding import DecodeConfig, TypicalAcceptance
from eval.decoder.chain_rules import ChainVerification
from eval.decoder.tree_rules import TreeVerification
from eval.decoder.verifier import Verifier, rooted
from heads.device import on_device, widest_float
from heads.proposers.protocol import Proposal
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.probabilities import token_probabilities
from heads.sampling.token_tree import DynamicTreeSpec, Tree


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

    Args:
        p: the target's distributions.
        epsilon: a token above it is plausible after any prefix; in (0, 1), for at 1 a point mass would refuse its own token.
        delta: share of exp(-entropy in nats) that will do where the target is undecided; positive.
    """
    entropy = -torch.xlogy(p, p).sum(-1)
    return (delta * (-entropy).exp()).clamp(max=epsilon)


def verify_typical(p_BKV: Tensor, tokens_BG: Tensor, num_drafted_B: Tensor, epsilon: float, delta: float) -> ChainVerification:
    """Keep the leading drafts that are plausible, then put the target's likeliest token. Args as for the rules for chains."""
    chain_N = torch.arange(-1, tokens_BG.shape[1], device=tokens_BG.device)
    tokens_BN = torch.nn.functional.pad(tokens_BG, (1, 0))
    parents_BN = torch.where(chain_N < num_drafted_B.unsqueeze(1), chain_N, -1)
    verdict = verify_typical_tree(p_BKV, tokens_BN, parents_BN, tokens_BG.shape[1], epsilon, delta)
    return ChainVerification(verdict.num_accepted_B, verdict.next_token_B)


def verify_typical_tree(
    p_BNV: Tensor, tokens_BN: Tensor, parents_BN: Tensor, depth: int, epsilon: float, delta: float
) -> TreeVerification:
    """Keep the deepest path of plausible tokens, the likeliest of equals, then put the target's likeliest token. Lossy.

    Args as for `eval.decoder.tree_rules.match_tree` and `typical_threshold`; row i of `p_BNV` comes after node i.
    """
    parents_BN = parents_BN.expand_as(tokens_BN)
    above_BN = parents_BN.clamp(min=0)
    p_of_node_BN = p_BNV[torch.arange(len(p_BNV), device=p_BNV.device).unsqueeze(1), above_BN, tokens_BN]
    plausible_BN = (p_of_node_BN > typical_threshold(p_BNV, epsilon, delta).gather(1, above_BN)) & (parents_BN >= 0)
    lengths_BN, scores_BN = _paths(plausible_BN, p_of_node_BN.to(widest_float(p_of_node_BN.device)).log(), above_BN, depth)
    longest_B1 = lengths_BN.amax(1, keepdim=True)
    end_B = scores_BN.masked_fill(lengths_BN < longest_B1, float("-inf")).argmax(1)
    path_BD = _climb(end_B, longest_B1, parents_BN, depth)
    after_end_BV = p_BNV[torch.arange(len(p_BNV), device=p_BNV.device), end_B]
    return TreeVerification(path_BD, longest_B1.squeeze(1), after_end_BV.argmax(-1))


def _paths(keeps_BN: Tensor, log_p_BN: Tensor, above_BN: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return by node the length and the log-probability of the path to it, -1 and 0 where a node on it is not kept."""
    lengths_BN = torch.full_like(above_BN, -1)
    lengths_BN[:, 0] = 0
    scores_BN = torch.zeros_like(log_p_BN)
    for level in range(1, depth + 1):
        arrives_BN = keeps_BN & (lengths_BN.gather(1, above_BN) == level - 1)
        lengths_BN = torch.where(arrives_BN, level, lengths_BN)
        scores_BN = torch.where(arrives_BN, scores_BN.gather(1, above_BN) + log_p_BN, scores_BN)
    return lengths_BN, scores_BN


def _climb(end_B: Tensor, length_B1: Tensor, parents_BN: Tensor, depth: int) -> Tensor:
    """Return the nodes from the root's child down to each row's end, padded with -1 `[B, D]`."""
    path_BD = parents_BN.new_full((len(end_B), depth), -1)
    node_B1 = end_B.unsqueeze(1)
    for level in reversed(range(depth)):
        on_path_B1 = length_B1 > level
        path_BD[:, level : level + 1] = torch.where(on_path_B1, node_B1, -1)
        node_B1 = torch.where(on_path_B1, parents_BN.gather(1, node_B1), node_B1)
    return path_BD

"""Verification rules: which of the drafted tokens stay, and which token comes after them.

Pure functions of (p, q, tokens, uniforms); that their output follows the target's distribution is shown by exact enumeration
(`tests.support.enumeration`). Of a chain, row i of the K = G + 1 target rows is for draft i, row G for the bonus token; rows of
a batch may hold fewer drafts than G (`num_drafted_B`), and what lies beyond is never read.

In a tree a rule picks among the candidates for one position (`CandidateRule`), and `verify_tree` walks the tree with it;
`match_tree` follows the target's own tokens instead. Node 0 is the pending token, the root; every other node has a parent with
a smaller number. Siblings are in the order in which they were drawn (`heads.sampling.draws`). Row i of the
distributions comes after node i: p is the target's, q the one that the node's children were drawn from. Lossless as long as no
drawn node was left out for its token or its probability.
B rows, G drafts, C candidates, N nodes with the root, D depth of the deepest node, K = D + 1 levels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heads.device import widest_float
from heads.sampling.draws import draw, values_at

RHO_BISECTIONS = 20
LOG_LARGE = 1e4  # of a ratio that is kept finite: one to a probability of 0

# (p_BKV, q_BGV, tokens_BG, num_drafted_B, accept_BG, residual_B, bonus_B), see `verify_tokens`
ChainRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], "ChainVerification"]

# --- chains -------------------------------------------------------------------------------------------------------


class ChainVerification(NamedTuple):
    """The result of a rule on a chain."""

    num_accepted_B: Tensor  # drafts that stay, 0..num_drafted
    next_token_B: Tensor  # the token that comes after them, from the target


def verify_greedy(target_tokens_BK: Tensor, tokens_BG: Tensor, num_drafted_B: Tensor) -> ChainVerification:
    """Keep drafts while they equal the target's own tokens.

    With the target's greedy choices as `target_tokens_BK` this is greedy decoding. With draws from the target's distribution
    it is rejection against a one-hot q: a draft x stays with probability p(x), and what is drawn in its place follows the
    residual, p without x. It is lossless for any deterministic proposal, and with the same numbers its output is plain
    decoding's, token by token.
    """
    num_accepted_B = _leading((target_tokens_BK[:, :-1] == tokens_BG) & _drafted(tokens_BG, num_drafted_B))
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

    Arguments as for `verify_tokens`; `accept_BG[:, i]` decides about the prefix that ends with draft i.
    """
    wide = widest_float(p_BKV.device)
    ratio_BG = values_at(p_BKV[:, :-1], tokens_BG).to(wide) / values_at(q_BGV, tokens_BG)
    # With S_i the sum of the logarithms of the ratios up to i, log P_i = S_i - max(S_0, ..., S_i).
    sums_BK = functional.pad(ratio_BG.log().clamp(max=LOG_LARGE).cumsum(1), (1, 0))
    P_BK = (sums_BK - sums_BK.cummax(1).values).exp()
    # R for prefixes 1..G-1, which are followed by another draft; the last column is not used as such.
    R_BG = (P_BK[:, 1:-1, None] * p_BKV[:, 1:-1] - q_BGV[:, 1:]).clamp(min=0).sum(-1).to(wide)
    open_BG = R_BG / (R_BG + 1 - P_BK[:, 1:-1]).clamp(min=torch.finfo(wide).tiny)
    keep_BG = torch.cat([open_BG, P_BK[:, -1:]], 1)
    length_G = torch.arange(1, tokens_BG.shape[1] + 1, device=tokens_BG.device)
    whole_BG = length_G == num_drafted_B.unsqueeze(1)
    keep_BG = torch.where(whole_BG, P_BK[:, 1:], keep_BG)
    wins_BG = (accept_BG < keep_BG) & (length_G <= num_drafted_B.unsqueeze(1))
    num_accepted_B = (wins_BG * length_G).amax(1)
    return _finish(p_BKV, q_BGV, num_accepted_B, num_drafted_B, values_at(P_BK, num_accepted_B), residual_B, bonus_B)


CHAIN_RULES: dict[str, ChainRule] = {"token": verify_tokens, "block": verify_block}


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


# --- trees --------------------------------------------------------------------------------------------------------


class CandidateChoice(NamedTuple):
    """The result of a rule at one position."""

    accepted_B: Tensor  # index of the candidate that stays, -1 for none
    rest_BV: Tensor  # unnormalised distribution of the next token where none stays; undefined in the other rows


# (p_BV, q_BV, tokens_BC, num_candidates_B, accept_BC), see `with_replacement`
CandidateRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], CandidateChoice]
ProbsAfter = Callable[[Tensor], Tensor]  # a node's number by row `[B]` -> the target's distribution after it `[B, V]`
TokenAfter = Callable[[Tensor, int], Tensor]  # the same and the node's depth -> the target's own token after it `[B]`


def with_replacement(
    p_BV: Tensor, q_BV: Tensor, tokens_BC: Tensor, num_candidates_B: Tensor, accept_BC: Tensor
) -> CandidateChoice:
    """Recursive rejection of independent candidates (Miao et al., SpecInfer, 2305.09781).

    With r_1 = p, candidate i stays with probability min(1, r_i/q); a rejection leaves r_{i+1} = norm((r_i - q)+).

    Args:
        p_BV: the target's distribution.
        q_BV: the distribution each candidate was drawn from.
        tokens_BC: the candidates in the order they were drawn.
        num_candidates_B: candidates that count in each row, 0..C; ids beyond must be in range and are not tested.
        accept_BC: independent uniforms in [0, 1), one a candidate.
    """
    return reject_recursively(p_BV, repeat(q_BV, tokens_BC.shape[1]), tokens_BC, num_candidates_B, accept_BC)


def without_replacement(
    p_BV: Tensor, q_BV: Tensor, tokens_BC: Tensor, num_candidates_B: Tensor, accept_BC: Tensor
) -> CandidateChoice:
    """Recursive rejection of distinct candidates (Chen et al., Sequoia, 2402.12374; Jeon et al., RSD, 2402.14160).

    As `with_replacement`, but candidate i is tested against the distribution it was drawn from: q without the candidates
    before it, renormalised. A candidate drawn after q ran out is skipped.
    """
    return reject_recursively(p_BV, _shrinking(q_BV, tokens_BC), tokens_BC, num_candidates_B, accept_BC)


def reject_recursively(
    p_BV: Tensor, distributions: Iterable[Tensor], tokens_BC: Tensor, num_candidates_B: Tensor, accept_BC: Tensor
) -> CandidateChoice:
    """Recursive rejection of candidates drawn from a distribution `[B, V]` each, which may depend on those before it."""
    rest_BV = p_BV
    accepted_B = torch.full_like(num_candidates_B, -1)
    for number, (probs_BV, token_B, accept_B) in enumerate(
        zip(distributions, tokens_BC.unbind(1), accept_BC.unbind(1), strict=True)
    ):
        tested_B = (accepted_B < 0) & (number < num_candidates_B)
        if not may_hold(tested_B):
            break
        mass_B = rest_BV.sum(-1)
        q_of_B, rest_of_B = values_at(probs_BV, token_B), values_at(rest_BV, token_B)
        stays_B = tested_B & (q_of_B > 0) & (accept_B * q_of_B * mass_B < rest_of_B)
        accepted_B = torch.where(stays_B, number, accepted_B)
        left_BV = (rest_BV - mass_B.unsqueeze(1) * probs_BV).clamp(min=0)
        # Equal distributions up to rounding leave nothing; a rejection then has probability 0 up to rounding.
        shrinks_B = tested_B & ~stays_B & (left_BV.sum(-1) > 0)
        rest_BV = torch.where(shrinks_B.unsqueeze(1), left_BV, rest_BV)
    return CandidateChoice(accepted_B, rest_BV)


def k_seq(p_BV: Tensor, q_BV: Tensor, tokens_BC: Tensor, num_candidates_B: Tensor, accept_BC: Tensor) -> CandidateChoice:
    """SpecTr's k-SEQ for independent candidates (Sun et al., 2310.15141): one test for all, with p discounted.

    Each candidate in turn stays with probability min(1, p/(rho q)), one of k with probability A = 1 - (1 - b)^k where
    b = sum_v min(q, p/rho). An accepted token has the distribution min(q, p/rho)/b, so that p - A min(q, p/rho)/b is left
    for the rejected. It is nowhere negative for A <= rho b; `k_seq_rho` finds the least such rho.
    """
    rho_B = k_seq_rho(p_BV, q_BV, num_candidates_B)
    discounted_BV = torch.minimum(q_BV, p_BV / rho_B.unsqueeze(1))
    b_B = discounted_BV.sum(-1)
    share_B = (1 - (1 - b_B) ** num_candidates_B) / b_B.clamp(min=torch.finfo(b_B.dtype).tiny)
    p_of_BC, q_of_BC = p_BV.gather(-1, tokens_BC), q_BV.gather(-1, tokens_BC)
    counts_BC = torch.arange(tokens_BC.shape[1], device=tokens_BC.device) < num_candidates_B.unsqueeze(1)
    stays_BC = (accept_BC * rho_B.unsqueeze(1) * q_of_BC < p_of_BC) & counts_BC
    accepted_B = torch.where(stays_BC.any(1), stays_BC.int().argmax(1), -1)
    rest_BV = (p_BV - share_B.unsqueeze(1) * discounted_BV).clamp(min=0)  # rounding may leave nothing where no rejection can be
    return CandidateChoice(accepted_B, torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV))


def k_seq_rho(p_BV: Tensor, q_BV: Tensor, num_candidates_B: Tensor) -> Tensor:
    """Return k-SEQ's discount `[B]`, the root in [1, k] of rho b(rho) = 1 - (1 - b(rho))^k, by bisection from above.

    Every rho beyond the root keeps the rule lossless and only costs acceptance, so the upper end is returned and few steps do.
    """
    low_B = torch.ones_like(p_BV[:, 0])
    high_B = num_candidates_B.to(p_BV.dtype).clamp(min=1)
    for _ in range(RHO_BISECTIONS):
        rho_B = (low_B + high_B) / 2
        b_B = torch.minimum(q_BV, p_BV / rho_B.unsqueeze(1)).sum(-1)
        enough_B = rho_B * b_B >= 1 - (1 - b_B) ** num_candidates_B
        low_B, high_B = torch.where(enough_B, low_B, rho_B), torch.where(enough_B, rho_B, high_B)
    return high_B


CANDIDATE_RULES: dict[str, CandidateRule] = {
    "with_replacement": with_replacement,
    "without_replacement": without_replacement,
    "k_seq": k_seq,
}


class TreeVerification(NamedTuple):
    """The result of a rule on a tree."""

    path_BD: Tensor  # numbers of the nodes that stay, from the root's child downwards, -1 beyond the path
    num_accepted_B: Tensor  # their count, 0..D
    next_token_B: Tensor  # the token that comes after them, from the target


def verify_tree(
    p_after: ProbsAfter,
    q_BNV: Tensor,
    tokens_BN: Tensor,
    parents_BN: Tensor,
    accept_BN: Tensor,
    next_BK: Tensor,
    *,
    width: int,
    rule: CandidateRule = without_replacement,
) -> TreeVerification:
    """Walk a tree from the root, at each node by a rule for several candidates; lossless.

    Args:
        p_after: gives the target's distribution after a node of each row; called only for nodes on the walk.
        q_BNV: the distribution that the children of each node were drawn from; rows of leaves may hold anything finite.
        tokens_BN: the nodes' tokens; the root's is not read.
        parents_BN: the nodes' parents, -1 for the root and for nodes a row does not have; `[N]` where all rows share one tree.
        accept_BN: independent uniforms in [0, 1), one for the test of each node.
        next_BK: independent uniforms for the token that comes after a path of 0..D nodes.
        width: the largest number of children of a node.
        rule: the rule for the way in which the children were drawn.
    """
    rows_B = torch.arange(len(tokens_BN), device=tokens_BN.device)
    children_BNC = children_of(parents_BN.expand_as(tokens_BN), width)
    path_BD = tokens_BN.new_full((len(tokens_BN), next_BK.shape[1] - 1), -1)
    node_B, walks_B = torch.zeros_like(rows_B), torch.ones_like(rows_B, dtype=torch.bool)
    weights_BV = p_after(node_B)
    for level in range(path_BD.shape[1]):
        children_BC = children_BNC[rows_B, node_B]
        tokens_BC, accept_BC = (values.gather(1, children_BC.clamp(min=0)) for values in (tokens_BN, accept_BN))
        # A row whose walk has ended gets no candidates, and its weights come back unchanged.
        num_candidates_B = (children_BC >= 0).sum(1) * walks_B
        accepted_B, weights_BV = rule(weights_BV, q_BNV[rows_B, node_B], tokens_BC, num_candidates_B, accept_BC)
        walks_B = accepted_B >= 0
        if not may_hold(walks_B):
            break
        node_B = torch.where(walks_B, children_BC.gather(1, accepted_B.clamp(min=0).unsqueeze(1)).squeeze(1), node_B)
        path_BD[:, level] = torch.where(walks_B, node_B, -1)
        weights_BV = torch.where(walks_B.unsqueeze(1), p_after(node_B), weights_BV)
    num_accepted_B = (path_BD >= 0).sum(1)
    return TreeVerification(path_BD, num_accepted_B, draw(weights_BV, values_at(next_BK, num_accepted_B)))


def match_tree(target_token: TokenAfter, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> TreeVerification:
    """Walk a tree along the target's own tokens, from the root to the child that bears the token, while there is one.

    With the target's greedy choices this is greedy decoding. With draws from its distributions the output is that of plain
    decoding with the same numbers, as with `verify_greedy`. Lossless for any tree that does not depend on those draws. Of equal
    siblings only the first is ever walked, and nothing that lies deeper than `depth`.
    """
    path_BD = tokens_BN.new_full((len(tokens_BN), depth), -1)
    node_B = tokens_BN.new_zeros(len(tokens_BN))
    walks_B = torch.ones_like(node_B, dtype=torch.bool)
    next_token_B = target_token(node_B, 0)
    for level in range(depth):
        hits_BN = (parents_BN == node_B.unsqueeze(1)) & (tokens_BN == next_token_B.unsqueeze(1))
        walks_B = walks_B & hits_BN.any(1)
        if not may_hold(walks_B):
            break
        node_B = torch.where(walks_B, hits_BN.int().argmax(1), node_B)
        path_BD[:, level] = torch.where(walks_B, node_B, -1)
        next_token_B = torch.where(walks_B, target_token(node_B, level + 1), next_token_B)
    return TreeVerification(path_BD, (path_BD >= 0).sum(1), next_token_B)


def children_of(parents_BN: Tensor, width: int) -> Tensor:
    """Return the first children's numbers `[B, N, width]` of every node, -1 where there are fewer; without a wait for a GPU."""
    num_rows, num_nodes = parents_BN.shape
    rank_BN = (parents_BN.unsqueeze(2) == parents_BN.unsqueeze(1)).tril(-1).sum(2)
    spare = num_nodes * width  # the root, and ranks beyond the width, go to a column that is cut off
    place_BN = torch.where((parents_BN >= 0) & (rank_BN < width), parents_BN * width + rank_BN, spare)
    children_BP = parents_BN.new_full((num_rows, spare + 1), -1)
    numbers_BN = torch.arange(num_nodes, device=parents_BN.device).expand_as(parents_BN)
    return children_BP.scatter(1, place_BN, numbers_BN)[:, :spare].reshape(num_rows, num_nodes, width)


def may_hold(flags_B: Tensor) -> bool:
    """Return whether any flag is set, on a CPU; elsewhere True, because the answer would have to be waited for."""
    return flags_B.device.type != "cpu" or bool(flags_B.any())


def _shrinking(q_BV: Tensor, tokens_BC: Tensor) -> Iterator[Tensor]:
    """Yield the distribution each distinct candidate was drawn from; all 0 once q has run out."""
    for token_B in tokens_BC.unbind(1):
        yield q_BV / q_BV.sum(-1, keepdim=True).clamp(min=torch.finfo(q_BV.dtype).tiny)
        q_BV = q_BV.scatter(-1, token_B.unsqueeze(-1), 0.0)

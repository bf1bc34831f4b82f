"""Verification rules for a tree of drafted tokens: which path stays, and which token comes after it.

At one node a rule picks among the candidates for one position (`CandidateRule`), and `verify_tree` walks the tree with it;
`match_tree` follows the target's own tokens instead. Pure functions of (p, q, tokens, uniforms); that their output follows the
target's distribution is shown by exact enumeration (`tests.support.enumeration`).

Node 0 is the pending token, the root; every other node has a parent with a smaller number. Siblings are in the order in which
they were drawn (`heads.sampling.probabilities`). Row i of the distributions comes after node i: p is the target's, q the one
that the node's children were drawn from. Lossless as long as no drawn node was left out for its token or its probability.
B rows, C candidates, N nodes with the root, D depth of the deepest node, K = D + 1 levels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from heads.sampling.probabilities import draw, values_at

RHO_BISECTIONS = 20


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
    """Recursive rejection with a distribution for each candidate, for instance from several drafts.

    Lossless where candidate i was drawn from `distributions[i]` `[B, V]`, normalised or all 0 where the row has no such
    candidate, which may depend on the candidates before it and on nothing else. For the rest see `with_replacement`.
    """
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
    rest_BV = (p_BV - share_B.unsqueeze(1) * discounted_BV).clamp(min=0)
    # Rounding may leave nothing where a rejection has probability 0.
    return CandidateChoice(accepted_B, torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV))


def k_seq_rho(p_BV: Tensor, q_BV: Tensor, num_candidates_B: Tensor) -> Tensor:
    """Return k-SEQ's discount `[B]`, the root in [1, k] of rho b(rho) = 1 - (1 - b(rho))^k, by bisection from above.

    The left side rises with rho and the right side falls. Every rho beyond the root keeps the rule lossless and only costs
    acceptance, so the upper end is returned and few steps do.
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
    q_BNV: Tensor | None,
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
        p_after: gives the target's distribution after a node of each row; called only for nodes on the walk. `rows_of` makes
            it from a tensor.
        q_BNV: the distribution that the children of each node were drawn from; rows of leaves may hold anything finite. None
            for children that were not drawn: they are matched with a draw from p (`match_tree`), and neither `rule` nor
            `accept_BN` is read.
        tokens_BN: the nodes' tokens; the root's is not read.
        parents_BN: the nodes' parents, -1 for the root and for nodes a row does not have; `[N]` where all rows share one tree.
        accept_BN: independent uniforms in [0, 1), one for the test of each node.
        next_BK: independent uniforms for the token that comes after a path of 0..D nodes. With `q_BNV` None and the numbers
            that plain decoding draws with at these positions, the output is that of plain decoding.
        width: the largest number of children of a node.
        rule: the rule for the way in which the children were drawn.
    """
    if q_BNV is None:
        depth = next_BK.shape[1] - 1
        return match_tree(lambda node_B, level: draw(p_after(node_B), next_BK[:, level]), tokens_BN, parents_BN, depth)
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
    return TreeVerification(
        path_BD, num_accepted_B, draw(weights_BV, next_BK.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1))
    )


def match_tree(target_token: TokenAfter, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> TreeVerification:
    """Walk a tree along the target's own tokens, from the root to the child that bears the token, while there is one.

    With the target's greedy choices this is greedy decoding, with draws from its distributions it is sample-and-match.
    Lossless for any tree that does not depend on those draws. Of equal siblings only the first is ever walked, and nothing
    that lies deeper than `depth`. `tokens_of` makes `target_token` from a tensor.
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


def rows_of(p_BNV: Tensor) -> ProbsAfter:
    """Look the distribution after a node up in a tensor of all of them."""
    rows_B = torch.arange(len(p_BNV), device=p_BNV.device)
    return lambda node_B: p_BNV[rows_B, node_B]


def tokens_of(target_tokens_BN: Tensor) -> TokenAfter:
    """Look the target's own token after a node up in a tensor of all of them."""
    return lambda node_B, _: target_tokens_BN.gather(1, node_B.unsqueeze(1)).squeeze(1)


def children_of(parents_BN: Tensor, width: int) -> Tensor:
    """Return the children's numbers `[B, N, width]` of every node in rising order, -1 where there are fewer.

    Children beyond the first `width` of a node are left out. Does not synchronise with a GPU.
    """
    num_rows, num_nodes = parents_BN.shape
    siblings_BNN = parents_BN.unsqueeze(2) == parents_BN.unsqueeze(1)
    rank_BN = siblings_BNN.tril(-1).sum(2)
    # The root, and ranks beyond the width, go to a column that is cut off.
    spare = num_nodes * width
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
        mass_B1 = q_BV.sum(-1, keepdim=True)
        yield q_BV / mass_B1.clamp(min=torch.finfo(q_BV.dtype).tiny)
        q_BV = q_BV.scatter(-1, token_B.unsqueeze(-1), 0.0)

"""Verification along a tree of drafted tokens: which path stays, and which token comes after it.

Pure functions. Node 0 is the pending token, the root; every other node follows its parent, which has a smaller number. The
children of a node are the candidates for the position after it, in the order of their numbers, which must be the order they
were drawn in. Row i of the laws stands for what comes after node i: p the target's, q the one that the node's children were
drawn from. Left out: what makes a tree (its shape, its mask, its drafting).

A sampled tree is lossless as long as no drawn node was left out for what it is or for how probable the draft holds it: such a
choice changes the law of what remains. A tree pruned by confidence is verified as deterministic, with `q_BNV` None, for which
any choice of nodes will do.
B rows, N nodes with the root, C children of one node at most, D depth of the deepest node, K = D + 1 levels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eval.candidates import CandidateRule, may_hold, without_replacement
from heads.law import draw

LawAfter = Callable[[Tensor], Tensor]  # a node's number by row `[B]` -> the target's law after it `[B, V]`
TokenAfter = Callable[[Tensor, int], Tensor]  # the same and the node's depth -> the target's own token after it `[B]`


class TreeVerdict(NamedTuple):
    """How a round ends.

    Args:
        path_BD: numbers of the nodes that stay, from the root's child downwards, -1 beyond the path.
        num_accepted_B: their count, 0..D.
        next_token_B: the token that comes after them, from the target.
    """

    path_BD: Tensor
    num_accepted_B: Tensor
    next_token_B: Tensor


def verify_tree(
    p_after: LawAfter,
    q_BNV: Tensor | None,
    tokens_BN: Tensor,
    parents_BN: Tensor,
    accept_BN: Tensor,
    next_BK: Tensor,
    *,
    width: int,
    rule: CandidateRule = without_replacement,
) -> TreeVerdict:
    """Walk a tree from the root, at each node by a rule for several candidates; lossless.

    Args:
        p_after: the target's laws, asked for at the nodes visited only (of N rows, at most K matter); for laws that are there
            already `rows_of` makes it.
        q_BNV: the law that the children of each node were drawn from; rows of leaves may hold anything finite. None for
            children that were not drawn: they are held against a draw from p (`match_tree`), and neither `rule` nor
            `accept_BN` is read.
        tokens_BN: the nodes' tokens; the root's is not read.
        parents_BN: the nodes' parents, -1 for the root and for nodes a row does not have; `[N]` where all rows share one tree.
        accept_BN: independent uniforms in [0, 1), one for the test of each node.
        next_BK: independent uniforms for the token that comes after a path of 0..D nodes. With `q_BNV` None and the numbers
            plain decoding draws with at these positions, the output is the one of plain decoding.
        width: no node has more children.
        rule: goes with the way the children were drawn.
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
        # A row that has ended is given no candidates, and its weights come back as they are.
        num_candidates_B = (children_BC >= 0).sum(1) * walks_B
        accepted_B, weights_BV = rule(weights_BV, q_BNV[rows_B, node_B], tokens_BC, num_candidates_B, accept_BC)
        walks_B = accepted_B >= 0
        if not may_hold(walks_B):
            break
        node_B = torch.where(walks_B, children_BC.gather(1, accepted_B.clamp(min=0).unsqueeze(1)).squeeze(1), node_B)
        path_BD[:, level] = torch.where(walks_B, node_B, -1)
        weights_BV = torch.where(walks_B.unsqueeze(1), p_after(node_B), weights_BV)
    num_accepted_B = (path_BD >= 0).sum(1)
    return TreeVerdict(path_BD, num_accepted_B, draw(weights_BV, next_BK.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1)))


def match_tree(target_token: TokenAfter, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> TreeVerdict:
    """Walk a tree along the target's own tokens, from the root to the child that bears the token, while there is one.

    With the target's greedy choices this is greedy decoding, with draws from its laws it is sample-and-match. Lossless for any
    tree that does not depend on those draws. Siblings should differ: of equal ones only the first is ever walked.

    Args:
        target_token: gives what the target itself puts after each row's node; `tokens_of` makes it from a table.
        tokens_BN, parents_BN: as for `verify_tree`.
        depth: of the deepest node; what lies deeper is not walked.
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
    return TreeVerdict(path_BD, (path_BD >= 0).sum(1), next_token_B)


def rows_of(p_BNV: Tensor) -> LawAfter:
    """Give the laws after nodes from a tensor that holds them all."""
    rows_B = torch.arange(len(p_BNV), device=p_BNV.device)
    return lambda node_B: p_BNV[rows_B, node_B]


def tokens_of(target_tokens_BN: Tensor) -> TokenAfter:
    """Give the target's own tokens after nodes from a tensor that holds them all, as for greedy decoding the argmax does."""
    return lambda node_B, _: target_tokens_BN.gather(1, node_B.unsqueeze(1)).squeeze(1)


def children_of(parents_BN: Tensor, width: int) -> Tensor:
    """Return the children's numbers `[B, N, width]` of every node in rising order, -1 where there are fewer.

    Children beyond the first `width` of a node are left out. No value is waited for on a GPU.
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

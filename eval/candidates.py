"""The verification rules for several candidates at one position: which of them stays, and what law the next token has if none.

Pure functions over (p, q, tokens, uniforms), batched over rows; `eval.tree_rules` walks them down a tree level by level, and
`eval.tree_enumeration` proves that their output follows the target's law. Every rule is for candidates drawn from
q by `heads.candidate_draws`, whose way of drawing must be the rule's; those that were not drawn are matched with the target's
own token (`eval.tree_rules.match_tree`). Left out: the optimal coupling, a linear programme over V^C tuples of candidates (Sun
et al., 2310.15141), which these rules stand in for.
B rows, C candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

RHO_BISECTIONS = 20


class Choice(NamedTuple):
    """What a rule decides at one position.

    Args:
        accepted_B: index of the candidate that stays, -1 for none.
        rest_BV: unnormalised law of the token that comes instead where none stays; means nothing in the other rows.
    """

    accepted_B: Tensor
    rest_BV: Tensor


CandidateRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Choice]


def with_replacement(p_BV: Tensor, q_BV: Tensor, tokens_BC: Tensor, num_candidates_B: Tensor, accept_BC: Tensor) -> Choice:
    """Recursive rejection of independent candidates (Miao et al., SpecInfer, 2305.09781).

    With r_1 = p, candidate i stays with probability min(1, r_i/q); a rejection leaves r_{i+1} = norm((r_i - q)+).

    Args:
        p_BV: the target's law.
        q_BV: the law each candidate was drawn from.
        tokens_BC: the candidates in the order they were drawn.
        num_candidates_B: candidates that count in each row, 0..C; ids beyond must be in range and are not judged.
        accept_BC: independent uniforms in [0, 1), one a candidate.
    """
    return reject_recursively(p_BV, repeat(q_BV, tokens_BC.shape[1]), tokens_BC, num_candidates_B, accept_BC)


def without_replacement(p_BV: Tensor, q_BV: Tensor, tokens_BC: Tensor, num_candidates_B: Tensor, accept_BC: Tensor) -> Choice:
    """Recursive rejection of distinct candidates (Chen et al., Sequoia, 2402.12374; Jeon et al., RSD, 2402.14160).

    As `with_replacement`, but candidate i is held against the law it was drawn from: q without the candidates before it,
    renormalised. A rejected token is thus not paid for twice. A candidate drawn after q ran out is passed over.

    Args: as for `with_replacement`.
    """
    return reject_recursively(p_BV, _shrinking(q_BV, tokens_BC), tokens_BC, num_candidates_B, accept_BC)


def reject_recursively(
    p_BV: Tensor, laws: Iterable[Tensor], tokens_BC: Tensor, num_candidates_B: Tensor, accept_BC: Tensor
) -> Choice:
    """Recursive rejection with a law for each candidate, for instance from several drafts.

    Lossless where candidate i was drawn from `laws[i]`, which may depend on the candidates before it and on nothing else.

    Args:
        laws: for each of the C columns a normalised law `[B, V]`; all 0 where the row has no such candidate.
        p_BV, tokens_BC, num_candidates_B, accept_BC: as for `with_replacement`.
    """
    rest_BV = p_BV
    accepted_B = torch.full_like(num_candidates_B, -1)
    for number, (law_BV, token_B, accept_B) in enumerate(zip(laws, tokens_BC.unbind(1), accept_BC.unbind(1), strict=True)):
        judged_B = (accepted_B < 0) & (number < num_candidates_B)
        if not may_hold(judged_B):
            break
        mass_B = rest_BV.sum(-1)
        q_of_B, rest_of_B = _at(law_BV, token_B), _at(rest_BV, token_B)
        stays_B = judged_B & (q_of_B > 0) & (accept_B * q_of_B * mass_B < rest_of_B)
        accepted_B = torch.where(stays_B, number, accepted_B)
        left_BV = (rest_BV - mass_B.unsqueeze(1) * law_BV).clamp(min=0)
        # Equal laws up to rounding leave nothing; a rejection then has probability 0 up to rounding.
        shrinks_B = judged_B & ~stays_B & (left_BV.sum(-1) > 0)
        rest_BV = torch.where(shrinks_B.unsqueeze(1), left_BV, rest_BV)
    return Choice(accepted_B, rest_BV)


def k_seq(p_BV: Tensor, q_BV: Tensor, tokens_BC: Tensor, num_candidates_B: Tensor, accept_BC: Tensor) -> Choice:
    """SpecTr's k-SEQ for independent candidates (Sun et al., 2310.15141): one test for all, with p discounted.

    Each candidate in turn stays with probability min(1, p/(rho q)), one of k with probability A = 1 - (1 - b)^k where
    b = sum_v min(q, p/rho). An accepted token has the law min(q, p/rho)/b, so that p - A min(q, p/rho)/b is left for the
    rejected. It is nowhere negative for A <= rho b; `k_seq_rho` finds the least such rho.

    Args: as for `with_replacement`.
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
    return Choice(accepted_B, torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV))


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


def may_hold(flags_B: Tensor) -> bool:
    """Say whether any flag is set, on a CPU; elsewhere say yes unasked, because the answer would have to be waited for."""
    return flags_B.device.type != "cpu" or bool(flags_B.any())


def _shrinking(q_BV: Tensor, tokens_BC: Tensor) -> Iterator[Tensor]:
    """Yield the law each distinct candidate was drawn from; all 0 once q has run out."""
    for token_B in tokens_BC.unbind(1):
        mass_B1 = q_BV.sum(-1, keepdim=True)
        yield q_BV / mass_B1.clamp(min=torch.finfo(q_BV.dtype).tiny)
        q_BV = q_BV.scatter(-1, token_B.unsqueeze(-1), 0.0)


def _at(values_BV: Tensor, token_B: Tensor) -> Tensor:
    return values_BV.gather(-1, token_B.unsqueeze(-1)).squeeze(-1)


CANDIDATE_RULES: dict[str, CandidateRule] = {
    "with_replacement": with_replacement,
    "without_replacement": without_replacement,
    "k_seq": k_seq,
}

"""Several candidates for one position, drawn from one distribution: with replacement, or without.

Drafting a sampled tree draws each node's children here; the rules in `eval.decoder.tree_rules` are lossless for exactly these
draws. Deterministic candidates, the likeliest few, are a `topk` and need no function. Numbers come in as uniforms, one a
candidate: sequential inversion has the distribution of Gumbel top-k, which would want one number a vocabulary entry.
B rows, C candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heads.sampling.probabilities import draw


def draw_with_replacement(probs_BV: Tensor, uniform_BC: Tensor) -> Tensor:
    """Return C independent draws `[B, C]` a row; the same token may come twice.

    Args:
        probs_BV: weights, not necessarily normalised.
        uniform_BC: independent uniforms in [0, 1).
    """
    cumulated_BV = probs_BV.double().cumsum(-1)
    last_B1 = torch.searchsorted(cumulated_BV, cumulated_BV[:, -1:].contiguous(), right=False)
    drawn_BC = torch.searchsorted(cumulated_BV, (uniform_BC * cumulated_BV[:, -1:]).contiguous(), right=True)
    return torch.minimum(drawn_BC, last_B1).clamp(max=probs_BV.shape[-1] - 1)


def draw_without_replacement(probs_BV: Tensor, uniform_BC: Tensor) -> Tensor:
    """Return up to C distinct draws `[B, C]` a row, in order: each from the distribution without the tokens drawn before it.

    A distribution with fewer than C tokens runs out; what stands in the columns beyond is an id in range that means nothing,
    and `eval.decoder.tree_rules.without_replacement` passes over it.

    Args: as for `draw_with_replacement`.
    """
    left_BV = probs_BV
    drawn = []
    for uniform_B in uniform_BC.unbind(1):
        token_B = draw(left_BV, uniform_B)
        left_BV = left_BV.scatter(-1, token_B.unsqueeze(-1), 0.0)
        drawn.append(token_B)
    return torch.stack(drawn, 1)


DRAWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "with_replacement": draw_with_replacement,
    "without_replacement": draw_without_replacement,
    "k_seq": draw_with_replacement,
}

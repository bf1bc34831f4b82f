"""Sampling several candidates for one position from one distribution, with replacement or without.

The children of each node of a sampled tree are drawn here; the rules in `eval.decoder.tree_rules` are lossless for exactly
these draws. Each candidate takes one uniform number: drawing one after another by inverse transform sampling has the
distribution of Gumbel top-k, which would take one number for each token of the vocabulary.
B rows, C candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heads.sampling.probabilities import draw, draw_with_replacement


def draw_without_replacement(probs_BV: Tensor, uniform_BC: Tensor) -> Tensor:
    """Return up to C distinct draws `[B, C]` a row, in order: each from the distribution without the tokens drawn before it.

    Where a distribution has fewer than C tokens, the columns beyond hold arbitrary ids in range, which
    `eval.decoder.tree_rules.without_replacement` skips.

    Args:
        probs_BV: weights, not necessarily normalised.
        uniform_BC: independent uniforms in [0, 1).
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

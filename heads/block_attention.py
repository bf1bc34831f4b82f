"""Attention of many blocks at once in training, each exactly as it will attend when it is drafted (`heads.dflash`).

The slots of a block see the target's context before their anchor, and all slots of their own block, in one softmax. Keys and
values of the context are made once for the row, whatever the number of blocks; blocks do not see each other, and nothing is
computed for the pairs of slots that are hidden anyway. Left out on purpose: a fused kernel; the scores, A * S * (T + S) a head,
are kept for the backward.
B batch, T positions, A blocks of a row, S slots of a block, X = A * S, N heads, M key-value heads, G = N / M, H head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.draft_layer import DraftAttention, Rotation

# 256 MiB in float32, several of which live at a time. Bounds the memory of a forward without a graph; training keeps them all.
AT_ONCE = 2**26


class BlockKeys:
    """What the blocks of a batch see beside themselves, the same for every layer.

    Args:
        context_BTD: made of the target's states; every layer makes its own keys and values of it.
        rotation: of its positions.
        visible_BAT: bool, which of its positions each block sees.
    """

    def __init__(self, context_BTD: Tensor, rotation: Rotation, visible_BAT: Tensor) -> None:
        self.context_BTD, self.rotation, self.visible_BAT = context_BTD, rotation, visible_BAT

    def attend(self, attention: DraftAttention, states_BXD: Tensor, rotation: Rotation) -> Tensor:
        """Return the attention output `[B, X, D]` of all blocks' slots, block after block."""
        context = attention.keys_values(self.context_BTD, self.rotation)
        own = attention.keys_values(states_BXD, rotation)
        return attention.output(mix_blocks(attention.queries(states_BXD, rotation), context, own, self.visible_BAT))


def mix_blocks(
    q_BNXH: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], visible_BAT: Tensor, *, at_once: int = AT_ONCE
) -> Tensor:
    """Return mixed values `[B, N, X, H]`.

    Args:
        q_BNXH: queries of the slots.
        context: keys and values `[B, M, T, H]` of the row.
        own: keys and values `[B, M, X, H]` of the slots.
        visible_BAT: bool, which positions of the row each block sees.
        at_once: scores computed at one time, over the batch and all heads; at least those of one block a row.
    """
    A, T = visible_BAT.shape[1:]
    B, N, X, _ = q_BNXH.shape
    S = X // A
    num_blocks = max(1, at_once // (B * N * S * (T + S)))
    own_parts = zip(*(each.split(num_blocks * S, 2) for each in (q_BNXH, *own)), strict=True)
    parts = [
        _mix(q_part, context, (k_part, v_part), visible_part)
        for (q_part, k_part, v_part), visible_part in zip(own_parts, visible_BAT.split(num_blocks, 1), strict=True)
    ]
    return torch.cat(parts, 2)


def _mix(q_BNXH: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], visible_BAT: Tensor) -> Tensor:
    A, T = visible_BAT.shape[1:]
    k_BMTH, v_BMTH = context
    k_BMASH, v_BMASH = (each.unflatten(2, (A, -1)) for each in own)
    q_BMGASH = q_BNXH.unflatten(1, (k_BMTH.shape[1], -1)).unflatten(3, (A, -1))
    hidden_B11A1T = ~visible_BAT[:, None, None, :, None]
    to_context = torch.einsum("bmgash,bmth->bmgast", q_BMGASH, k_BMTH).masked_fill(hidden_B11A1T, float("-inf"))
    to_own = torch.einsum("bmgash,bmarh->bmgasr", q_BMGASH, k_BMASH)
    scores = torch.cat([to_context, to_own], -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * q_BNXH.shape[-1] ** -0.5
    weights = scores.softmax(-1).to(v_BMTH.dtype)
    mixed_BMGASH = torch.einsum("bmgast,bmth->bmgash", weights[..., :T], v_BMTH)
    mixed_BMGASH = mixed_BMGASH + torch.einsum("bmgasr,bmarh->bmgash", weights[..., T:], v_BMASH)
    return mixed_BMGASH.flatten(3, 4).flatten(1, 2)

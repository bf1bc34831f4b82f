"""Attention while a head is unrolled over its own states in training, exactly as it will attend when it drafts.

Chains start at every origin j at once. At depth k the chain of origin j sees the depth-0 keys of origins up to j, which are
made of the target's states, and of the deeper keys only its own (EAGLE-3's "training-time test", arXiv 2503.01840). So one
causal block and a diagonal for each later depth, in one softmax; the diagonals cost no square.
B batch, T origins, N heads, M key-value heads, H head width, K depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.draft_layer import DraftAttention, Rotation


class UnrolledKeys:
    """Keys and values of one layer over the depths unrolled so far.

    Args:
        visible_B1TT: which depth-0 keys each origin sees (`heads.draft_layer.causal_mask`).
    """

    def __init__(self, visible_B1TT: Tensor) -> None:
        self.visible_B1TT = visible_B1TT
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, attention: DraftAttention, states_BTX: Tensor, rotation: Rotation) -> Tensor:
        """Return the attention output `[B, T, D]` of the next depth, whose keys are added."""
        k_BMTH, v_BMTH = attention.keys_values(states_BTX, rotation)
        self._keys.append(k_BMTH)
        self._values.append(v_BMTH)
        q_BNTH = attention.queries(states_BTX, rotation)
        if len(self._keys) == 1:
            return attention.attend(q_BNTH, k_BMTH, v_BMTH, self.visible_B1TT)
        return attention.output(self._mix(q_BNTH))

    def _mix(self, q_BNTH: Tensor) -> Tensor:
        """Return the values mixed by attention over the causal block and the diagonals, `[B, N, T, H]`."""
        groups = q_BNTH.shape[1] // self._keys[0].shape[1]
        keys = [keys.repeat_interleave(groups, 1) for keys in self._keys]
        values = [values.repeat_interleave(groups, 1) for values in self._values]
        scale = q_BNTH.shape[-1] ** -0.5
        block_BNTT = (q_BNTH @ keys[0].transpose(2, 3)).float() * scale
        block_BNTT = block_BNTT.masked_fill(~self.visible_B1TT, float("-inf"))
        diagonals_BNTK = torch.stack([(q_BNTH * own).sum(-1).float() * scale for own in keys[1:]], -1)
        weights = torch.cat([block_BNTT, diagonals_BNTK], -1).softmax(-1).to(values[0].dtype)
        T = block_BNTT.shape[-1]
        mixed_BNTH = weights[..., :T] @ values[0]
        for place, own in enumerate(values[1:]):
            mixed_BNTH = mixed_BNTH + weights[..., T + place, None] * own
        return mixed_BNTH

"""What the lean forward and drafts compute alike of a Llama layer: its norm, and the turning of queries and keys.

B batch, T positions, H head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def normed(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm over the last dimension; as in transformers the weight multiplies values rounded to their dtype."""
    return functional.rms_norm(values, values.shape[-1:], None, epsilon) * weight


def angles(embedding: Callable[..., tuple[Tensor, Tensor]], like: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of transformers' rotary embedding, `[B, T, H]`, the sines signed for a rolled head."""
    cos_BTH, sin_BTH = embedding(like, positions_BT)
    first_BTX, second_BTX = sin_BTH.chunk(2, -1)
    return cos_BTH, torch.cat([-first_BTX, second_BTX], -1)


def turned(heads: Tensor, cosines: Tensor, signed_sines: Tensor) -> Tensor:
    """Return queries or keys `[..., H]` turned by angles of a shape that goes with theirs."""
    return heads * cosines + heads.roll(heads.shape[-1] // 2, -1) * signed_sines

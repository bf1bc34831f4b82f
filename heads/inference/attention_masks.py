"""The masks of a forward that reads into a `RowCache`, by type of layer.

B batch, T new tokens, S cache length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from heads.inference.kv_cache import RowCache

Masks = Tensor | dict[str, Tensor | None] | None


def masks_of(
    config: PreTrainedConfig, cache: RowCache, positions_BT: Tensor, starts: Sequence[int], dtype: torch.dtype
) -> Masks:
    """Return masks that show each token exactly what `RowCache.visible` says, or None where the model's own causality does."""
    T = positions_BT.shape[1]
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    bounds = {} if window is None else {kind: {"window": window} for kind in ("sliding_attention", "hybrid_sliding")}
    bounds |= {} if chunk is None else {"chunked_attention": {"chunk": chunk}}
    layer_types = set(getattr(config, "layer_types", None) or ({"sliding_attention"} if window is not None else ()))
    if layer_types and layer_types <= {"linear_attention", "conv"}:
        return None
    if "hybrid_sliding" in layer_types:  # Inkling's blocks have these names, and its masks those
        layer_types |= {"full_attention", "sliding_attention", "linear_attention"}
    if layer_types.isdisjoint(bounds):
        # From position 0 on the model's own causal mask is right and takes a faster kernel; one token that sees all needs none.
        needed = cache.holds_tree or (max(starts) > 0 and (T > 1 or min(starts) != max(starts)))
        return _for_attention(cache.visible(positions_BT) if needed else None, config, dtype)
    masks = {
        kind: _for_attention(cache.visible(positions_BT, **bounds.get(kind, {})), config, dtype)
        for kind in layer_types - {"linear_attention", "conv"}
    } | dict.fromkeys(layer_types & {"linear_attention", "conv"})
    return masks if len(layer_types) > 1 else masks.popitem()[1]


def _for_attention(visible_BTS: Tensor | None, config: PreTrainedConfig, dtype: torch.dtype) -> Tensor | None:
    """Turn a boolean mask into the 4-D form of the attention in use: boolean for sdpa, additive for eager."""
    if visible_BTS is None:
        return None
    visible_B1TS = visible_BTS.unsqueeze(1)
    if config._attn_implementation != "eager":
        return visible_B1TS
    return torch.zeros_like(visible_B1TS, dtype=dtype).masked_fill(~visible_B1TS, torch.finfo(dtype).min)

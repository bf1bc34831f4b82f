"""The masks and positions of a forward that reads into a `RowCache`, by type of layer and by family.

In DeepSeek-V3.2 and Doge each token sees the keys of the highest scores. An indexer's score is a sum of ReLUs, so several may
be exactly 0. Which of equal ones `torch.topk` returns depends on the number of columns: `first_of_equals` makes it the first.
B batch, T new tokens, S cache length, N heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from heads.inference.kv_cache import RowCache

Masks = Tensor | dict[str, Tensor | None] | None
INDEXED = {"indexed_attention", "minimax_m3_sparse", "compressed_sparse_attention"}  # layer types


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


def by_axis(config: PreTrainedConfig, positions_BT: Tensor) -> Tensor:
    """Return packed positions as a model takes them: one that knows the axes of an image has a position for each besides."""
    knows_axes = "mrope_section" in (getattr(config.get_text_config(), "rope_parameters", None) or {})
    return positions_BT.expand(4, *positions_BT.shape) if knows_axes else positions_BT


def first_of_equals(config: PreTrainedConfig) -> AbstractContextManager[object]:
    """Return what to enter while a model of this text config runs, so that the first of keys of equal scores are seen."""
    indexed = hasattr(config, "keep_window_size") or not INDEXED.isdisjoint(getattr(config, "layer_types", None) or ())
    return _FirstOfEquals() if indexed else nullcontext()


class _FirstOfEquals(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return (_sorted_topk if func in (torch.topk, Tensor.topk) else func)(*args, **kwargs)


def _sorted_topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> torch.return_types.topk:
    values, indices = input.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def rope_limit(config: PreTrainedConfig) -> int | None:
    """Return after how many positions a model changes the rotary embedding of the whole text ("longrope"); None: never."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_type = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    limits = [
        int(limit)
        for each in by_type
        if each.get("rope_type") == "longrope" and each.get("short_factor") != each.get("long_factor")
        if (limit := each.get("original_max_position_embeddings")) is not None
    ]
    return min(limits, default=None)


def within_context(config: PreTrainedConfig, positions_BT: Tensor, end: int) -> Tensor:
    """Return positions before `end` with those of padding beyond the context moved to its last position."""
    limits = (rope_limit(config), getattr(config, "max_position_embeddings", None))
    context = min((limit for limit in limits if limit is not None), default=None)
    return positions_BT if context is None or end <= context else positions_BT.clamp(max=context - 1)

"""What the queries of one layer of a head see: the positions of a training row, or a cache of keys and values.

B batch, T positions, S keys, D width, N heads, M key-value heads, G = N / M, H head width, X what attention reads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from heads.inference.kv_cache import RowCache
from heads.modules.attention import Ranges, read_ranges
from heads.modules.layers import DraftAttention, LayerKeys, Rotation


class RowKeys(LayerKeys):
    """The keys of the same positions in training, of which each reads its range."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges

    def attend(self, attention: DraftAttention, states_BTX: Tensor, rotation: Rotation) -> Tensor:
        k_BMTH, v_BMTH = attention.keys_values(states_BTX, rotation)
        return attention.output(read_ranges(attention.queries(states_BTX, rotation), k_BMTH, v_BMTH, self.ranges)[0])


class CachedKeys(LayerKeys):
    """Keys and values of one layer in a cache, for drafting; those of the placed positions are added.

    `visible` is the mask `[B, 1, T, S]`, of one row where all positions see the same; None where `RowCache.is_causal`. With a
    `window` that is shorter than the text, attention from its beginning reads the keys of some queries at a time, and later
    tokens read as many as the window has: what a draft takes does not grow with the text.
    """

    def __init__(self, cache: RowCache, layer: int, visible: Tensor | None, window: int | None = None) -> None:
        self.cache, self.layer, self.visible, self.window = cache, layer, visible, window

    def attend(self, attention: DraftAttention, states_BTX: Tensor, rotation: Rotation) -> Tensor:
        q_BNTH, k_BMTH, v_BMTH = attention.project(states_BTX, rotation)
        k_BMSH, v_BMSH = self.cache.update(k_BMTH, v_BMTH, self.layer)
        G, T = q_BNTH.shape[1] // k_BMSH.shape[1], q_BNTH.shape[2]
        if self.visible is None and T > 1:  # a text from its beginning
            if self.window is not None and self.window < T:
                return attention.output(_read_window(q_BNTH, k_BMSH, v_BMSH, self.window))
            return attention.output(
                functional.scaled_dot_product_attention(q_BNTH, k_BMSH, v_BMSH, is_causal=True, enable_gqa=G > 1)
            )
        visible = self.visible
        if visible is not None and self.window is not None:
            seen = slice(self.cache.first_seen(self.window), None)
            k_BMSH, v_BMSH, visible = k_BMSH[:, :, seen], v_BMSH[:, :, seen], visible[..., seen]
        # Heads that share keys as rows: with a mask, kernels that know of such heads are those that hold all scores.
        q_BMXH = q_BNTH.unflatten(1, (-1, G)).flatten(2, 3)
        if visible is not None and visible.shape[2] > 1:
            visible = visible.repeat(1, 1, G, 1)
        mixed_BMXH = functional.scaled_dot_product_attention(q_BMXH, k_BMSH, v_BMSH, attn_mask=visible)
        return attention.output(mixed_BMXH.unflatten(2, (G, T)).flatten(1, 2))


def _read_window(q_BNTH: Tensor, k_BMTH: Tensor, v_BMTH: Tensor, window: int) -> Tensor:
    """Return what queries `[B, N, T, H]` mix of the last `window` positions, their own counted."""
    places_T, mixed = torch.arange(q_BNTH.shape[2], device=q_BNTH.device), []
    for start in range(0, q_BNTH.shape[2], window):
        queries, keys = slice(start, start + window), slice(max(0, start - window + 1), start + window)
        behind_XS = places_T[queries].unsqueeze(1) - places_T[keys]
        mixed.append(
            functional.scaled_dot_product_attention(
                q_BNTH[:, :, queries],
                k_BMTH[:, :, keys],
                v_BMTH[:, :, keys],
                attn_mask=(behind_XS >= 0) & (behind_XS < window),
                enable_gqa=q_BNTH.shape[1] > k_BMTH.shape[1],
            )
        )
    return torch.cat(mixed, 2)


def visible_slots(cache: RowCache, positions_BT: Tensor, window: int | None = None) -> Tensor | None:
    """Return which slots placed positions see, of these the last `window`, as `CachedKeys` takes it."""
    if cache.is_causal and (window is None or positions_BT.shape[1] > 1 or cache.end <= window):
        return None
    return cache.visible(positions_BT, window).unsqueeze(1)

"""A preallocated key-value cache in which every row of the batch has its own length, and the one way to run a model on it.

transformers' caches grow by concatenation and roll back, if at all, by the same count for every row. Here each forward says
at which position each row's new tokens start (`starts`), keys and values are written there, and a mask hides whatever lies
beyond. Rolling back is therefore starting again at an earlier position: nothing is copied, and rows may differ.

Sliding-window layers keep the full length and are masked; left out on purpose: paged and quantised storage.
B batch, T new tokens, S cache length, N key-value heads, H head width, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.configuration_utils import PreTrainedConfig

from configs.errors import InputError
from heads.lm_head import backbone

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass
class _Slots:
    """Where the forward under way writes: `starts` by row, `length` new tokens, and the same as an index for ragged rows."""

    starts: Sequence[int]
    length: int
    index: tuple[Tensor, slice, Tensor] | None  # rows [B, 1], all heads, positions [B, T]; None where all rows start alike

    @property
    def end(self) -> int:
        return max(self.starts) + self.length


class _RowLayer(CacheLayerMixin):
    """One layer's keys and values, `[B, N, capacity, H]`, allocated when the first states show their shape."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.slots = _Slots(starts=[0], length=0, index=None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        B, N, _, _ = key_states.shape
        self.keys = key_states.new_zeros(B, N, self.capacity, key_states.shape[-1])
        self.values = value_states.new_zeros(B, N, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write the new states into their slots and return views of everything up to the furthest row's end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.slots.end
        if self.slots.index is None:
            start = self.slots.starts[0]
            self.keys[:, :, start:end] = key_states
            self.values[:, :, start:end] = value_states
        else:
            self.keys[self.slots.index] = key_states.transpose(1, 2)
            self.values[self.slots.index] = value_states.transpose(1, 2)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.end, 0

    def get_seq_length(self) -> int:
        return max(self.slots.starts)

    def get_max_length(self) -> int:
        return self.capacity


class RowCache(Cache):
    """Keys and values of `num_layers` layers for up to `capacity` positions a row; see the module's docstring."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.rows = [_RowLayer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.rows))
        self.capacity = capacity

    def place(self, starts: Sequence[int], length: int, device: torch.device) -> None:
        """Say where the next forward writes: `length` tokens a row, row b from position `starts[b]` on.

        Raises:
            ValueError: that would run past the capacity.
        """
        if max(starts) + length > self.capacity:
            raise ValueError(f"positions up to {max(starts) + length} were asked of a cache of {self.capacity}")
        index = None
        if min(starts) != max(starts):
            positions_BT = torch.tensor(starts, device=device).unsqueeze(1) + torch.arange(length, device=device)
            index = (torch.arange(len(starts), device=device).unsqueeze(1), slice(None), positions_BT)
        slots = _Slots(starts=list(starts), length=length, index=index)
        for layer in self.rows:
            layer.slots = slots

    @property
    def placed_end(self) -> int:
        """How many positions the layers return after the forward under way: up to the furthest row's end."""
        return self.rows[0].slots.end

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""
        for layer in self.rows:
            if layer.is_initialized:
                index_B = torch.tensor(rows, device=layer.keys.device)
                layer.keys, layer.values = layer.keys[index_B], layer.values[index_B]


def new_cache(model: PreTrainedModel, capacity: int) -> RowCache:
    """Return an empty cache for `model` that holds `capacity` positions a row."""
    return RowCache(model.config.get_text_config().num_hidden_layers, capacity)


def check_rolls_back(model: PreTrainedModel) -> None:
    """Refuse a model whose memory of the past cannot be taken back after a rejected draft.

    Raises:
        InputError: it has recurrent, linear-attention or otherwise unknown layers.
    """
    config = model.config.get_text_config()
    unknown = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if model._is_stateful or unknown:
        what = f"layers of type {', '.join(sorted(unknown))}" if unknown else "a recurrent state"
        raise InputError(
            f"{type(model).__name__} has {what}: rejected tokens cannot be rolled back, so it cannot be decoded speculatively"
        )


def forward_rows(model: PreTrainedModel, cache: RowCache, ids_BT: Tensor, starts: Sequence[int]) -> Tensor:
    """Run a causal LM's backbone on tokens that continue each row at its own position.

    Args:
        model: the causal LM the cache was made for.
        cache: keys and values of positions before `starts`; those of the new tokens are added.
        ids_BT: token ids; column t of row b stands at position `starts[b] + t`.
        starts: first position by row. Anything cached at or after it is overwritten or hidden.

    Returns:
        The final, normed hidden states `[B, T, D]`; position t predicts t + 1 (`heads.lm_head.head_logits`).
    """
    T = ids_BT.shape[1]
    cache.place(starts, T, ids_BT.device)
    starts_B1 = torch.tensor(starts, device=ids_BT.device).unsqueeze(1)
    positions_BT = starts_B1 + torch.arange(T, device=ids_BT.device)
    config = model.config.get_text_config()
    output = backbone(model)(
        input_ids=ids_BT,
        position_ids=_within_context(config, positions_BT, max(starts) + T),
        attention_mask=_masks(config, positions_BT, starts, model.dtype),
        past_key_values=cache,
        use_cache=True,
    )
    return output.last_hidden_state


def _within_context(config: PreTrainedConfig, positions_BT: Tensor, end: int) -> Tensor:
    """Return positions before `end` with those beyond the context put on its last place.

    Only a row's padding stands there while a neighbour in the batch has room, but a learned position table has no such row.
    """
    context = getattr(config, "max_position_embeddings", None)
    return positions_BT if context is None or end <= context else positions_BT.clamp(max=context - 1)


def _masks(
    config: PreTrainedConfig, positions_BT: Tensor, starts: Sequence[int], dtype: torch.dtype
) -> Tensor | dict[str, Tensor | None] | None:
    """Return masks that show each position exactly those up to its own, or None where the model's own causality does."""
    T = positions_BT.shape[1]
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    keys_S = torch.arange(max(starts) + T, device=positions_BT.device)
    causal_BTS = None
    # From position 0 on the model's own causal mask is right and takes a faster kernel; so is none for one token that sees all.
    if max(starts) > 0 and (T > 1 or min(starts) != max(starts)):
        causal_BTS = keys_S <= positions_BT.unsqueeze(-1)
    if window is None or (layer_types and "sliding_attention" not in layer_types):
        return _for_attention(causal_BTS, config, dtype)
    sliding_BTS = (keys_S <= positions_BT.unsqueeze(-1)) & (keys_S > positions_BT.unsqueeze(-1) - window)
    if not layer_types:
        return _for_attention(sliding_BTS, config, dtype)
    if causal_BTS is None:
        causal_BTS = keys_S <= positions_BT.unsqueeze(-1)
    masks = {
        "full_attention": _for_attention(causal_BTS, config, dtype),
        "sliding_attention": _for_attention(sliding_BTS, config, dtype),
    }
    return masks if len(layer_types) > 1 else masks["sliding_attention"]


def _for_attention(visible_BTS: Tensor | None, config: PreTrainedConfig, dtype: torch.dtype) -> Tensor | None:
    """Turn a boolean mask into the 4-D form of the attention in use: boolean for sdpa, additive for eager."""
    if visible_BTS is None:
        return None
    visible_B1TS = visible_BTS.unsqueeze(1)
    if config._attn_implementation != "eager":
        return visible_B1TS
    return torch.zeros_like(visible_B1TS, dtype=dtype).masked_fill(~visible_B1TS, torch.finfo(dtype).min)

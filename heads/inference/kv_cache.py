"""A preallocated key-value cache in which every row of the batch has its own length.

Each forward says at which position each row's new tokens start, keys and values are written there, and a mask hides everything
beyond. Rolling back is starting again at an earlier position: nothing is copied. Tokens of a tree take consecutive slots
whatever their depth; those of the accepted path are then moved to where a chain would have put them.
B batch, T new tokens, S cache length, N key-value heads, H head width, A accepted drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from heads.device import RowInts, Rows, row_ints
from heads.sampling.token_tree import TreeAttention

STEPS = 127  # of int8, to either side
NOWHERE = RowInts([0], torch.zeros(1, dtype=torch.int64))  # before the first forward


@dataclass
class _Slots:
    """Where the current forward writes: `starts` by row, `length` new tokens, and the same as an index for ragged rows."""

    starts: RowInts
    length: int
    index: tuple[Tensor, slice, Tensor] | None  # rows [B, 1], all heads, positions [B, T]; None where all rows start alike
    attention: TreeAttention | None = None  # None: the tokens follow one another

    @property
    def end(self) -> int:
        return max(self.starts.host) + self.length


class RowLayer(CacheLayerMixin):
    """One layer's keys and values, `[B, N, capacity, H]`, allocated when the first states show their shape."""

    is_sliding = False
    stored: Sequence[str] = ("keys", "values")  # attributes, `[B, N, capacity, ...]`
    keys: Tensor
    values: Tensor
    index_keys: Tensor  # where an indexer has given some

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.slots = _Slots(starts=NOWHERE, length=0, index=None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._zeros(key_states), self._zeros(value_states)
        self.is_initialized = True

    def _zeros(self, like: Tensor, width: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return zeros `[B, N, capacity, width]`, of the states' width and dtype where none is given."""
        return like.new_zeros((*like.shape[:2], self.capacity, like.shape[-1] if width is None else width), dtype=dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write the new states into their slots and return views of everything up to the furthest row's end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._written(self.keys, key_states), self._written(self.values, value_states)

    def update_index(self, key_states: Tensor) -> Tensor:
        """Do the same with the keys `[B, 1, T, H]` by which an indexer chooses what attention sees (MiniMax-M3)."""
        if "index_keys" not in self.stored:
            self.index_keys = self._zeros(key_states)
            self.stored = (*self.stored, "index_keys")
        return self._written(self.index_keys, key_states)

    def update_indexer(self, key_states: Tensor) -> Tensor:
        return self.update_index(key_states.unsqueeze(1)).squeeze(1)

    def _written(self, stored: Tensor, states: Tensor) -> Tensor:
        end = self.slots.end
        if self.slots.index is None:
            stored[:, :, self.slots.starts.host[0] : end] = states
        else:
            stored[_index_on(self.slots.index, stored)] = states.transpose(1, 2)
        return stored[:, :, :end]

    def move(self, goal: tuple[Tensor, slice, Tensor], source: tuple[Tensor, slice, Tensor]) -> None:
        goal, source = _index_on(goal, self.keys), _index_on(source, self.keys)
        for name in self.stored:
            tensor = getattr(self, name)
            tensor[goal] = tensor[source]

    def keep_rows(self, index_B: Tensor) -> None:
        for name in self.stored:
            setattr(self, name, getattr(self, name)[index_B])

    def put_rows(self, index_B: Tensor, other: RowLayer) -> None:
        for name in other.stored:
            states = getattr(other, name)
            getattr(self, name)[index_B, :, : states.shape[2]] = states[:, :, : self.capacity]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.end, 0

    def get_seq_length(self) -> int:
        return max(self.slots.starts.host)

    def get_max_length(self) -> int:
        return self.capacity


class Int8Layer(RowLayer):
    """One layer's keys and values in int8 `[B, N, capacity, H]`, and their scales in float32 `[B, N, capacity, 1]`.

    A scale is a vector's largest magnitude divided by 127; the error is at most half a step. Attention reads the rounded values
    of a forward's own tokens too, so that speculative decoding gives the answers of plain decoding with the same cache. They
    are converted back when read, which takes time and, one layer at a time, a full layer's memory.
    """

    stored: Sequence[str] = ("keys", "values", "key_scales", "value_scales")
    key_scales: Tensor
    value_scales: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (self._zeros(each, dtype=torch.int8) for each in (key_states, value_states))
        self.key_scales, self.value_scales = (self._zeros(each, 1, torch.float32) for each in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write the new states, rounded, and return everything up to the furthest row's end in their dtype."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._write(self.keys, self.key_scales, key_states)
        self._write(self.values, self.value_scales, value_states)
        end, dtype = self.slots.end, key_states.dtype
        keys_BNSH = dequantise(self.keys[:, :, :end], self.key_scales[:, :, :end], dtype)
        return keys_BNSH, dequantise(self.values[:, :, :end], self.value_scales[:, :, :end], dtype)

    def _write(self, store: Tensor, scales: Tensor, states_BNTH: Tensor) -> None:
        rounded_BNTH, scales_BNT1 = quantise(states_BNTH)
        self._written(store, rounded_BNTH)
        self._written(scales, scales_BNT1)


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors `[..., H]` in int8, and scales `[..., 1]` in float32, not finite where a vector is not."""
    wide = values.float()
    scales = wide.abs().amax(-1, keepdim=True) / STEPS
    steps = torch.where(torch.isfinite(scales) & (scales > 0), wide / scales, 0.0)
    return steps.round().to(torch.int8), scales


def dequantise(steps: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return int8 vectors `[..., H]` times their scales, as `dtype`."""
    return (steps * scales).to(dtype)


LAYERS: Mapping[Literal["int8"] | None, Callable[[int], RowLayer]] = {None: RowLayer, "int8": Int8Layer}


class RowCache(Cache):
    """Keys and values of `num_layers` layers for up to `capacity` positions a row, of which `layer` makes each."""

    takes_rows = True  # `put_rows` is to be had

    def __init__(self, num_layers: int, capacity: int, layer: Callable[[int], RowLayer] = RowLayer) -> None:
        self.rows = [layer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self.rows))
        self.capacity = capacity
        self.offsets_B: Tensor | None = None  # by which positions after images are moved
        self._slots = _Slots(starts=NOWHERE, length=0, index=None)

    def moved(self, positions_BT: Tensor) -> Tensor:
        return positions_BT if self.offsets_B is None else positions_BT + self.offsets_B.unsqueeze(1)

    def place(self, starts: Rows, length: int, device: torch.device, attention: TreeAttention | None = None) -> None:
        """Set where the next forward writes: `length` tokens a row, from `starts[b]` on; with `attention` those of a tree."""
        starts = row_ints(starts, device)
        furthest = max(starts.host)
        if furthest + length > self.capacity:
            raise ValueError(f"positions up to {furthest + length} do not fit a cache of {self.capacity}")
        index = None
        if min(starts.host) != furthest:
            index = _index(starts, torch.arange(length, device=device))
        self._slots = _Slots(starts=starts, length=length, index=index, attention=attention)
        for layer in self.rows:
            layer.slots = self._slots

    def reading(self) -> AbstractContextManager[None]:
        """Return what a forward enters while it reads into the cache."""
        return nullcontext()

    def keep_states_from(self, starts: Sequence[int]) -> None:
        """Keep what rows need to go back as far as `starts`; keys and values need nothing."""

    @property
    def end(self) -> int:
        return self._slots.end

    @property
    def is_causal(self) -> bool:
        """Whether each token of the current forward sees just the slots before its own, and that one, in every row."""
        slots = self._slots
        return slots.attention is None and slots.index is None and (slots.length == 1 or max(slots.starts.host) == 0)

    @property
    def holds_tree(self) -> bool:
        return self._slots.attention is not None

    def visible(self, positions_BT: Tensor, window: int | None = None, chunk: int | None = None) -> Tensor:
        """Return which slots the tokens of the current forward, at these positions in the text, see, bool `[B, T, S]`.

        In a text each sees the positions up to its own, in a tree the committed ones, its ancestors and itself; of these only
        the last `window`, its own counted, or those in its own `chunk` of so many.
        """
        keys_S = torch.arange(self._slots.end, device=positions_BT.device)
        key_positions = keys_S
        if self._slots.attention is None:
            visible_BTS = keys_S <= positions_BT.unsqueeze(-1)
        else:
            visible_BTS, key_positions_BS = self._slots.attention.over(keys_S)
            key_positions = key_positions_BS.unsqueeze(1)
        if chunk is not None:
            visible_BTS = visible_BTS & (key_positions // chunk == positions_BT.unsqueeze(-1) // chunk)
        return visible_BTS if window is None else visible_BTS & (key_positions > positions_BT.unsqueeze(-1) - window)

    def first_seen(self, window: int) -> int:
        """Return the first slot that any token of the current forward sees if each sees the last `window` positions."""
        slots = self._slots
        first = slots.starts if slots.attention is None else slots.attention.roots
        return max(0, min(first.host) + 1 - window)

    def keep_path(self, starts: Rows, columns: Sequence[Sequence[int]], columns_BA: Tensor | None = None) -> None:
        """Move the states of a tree's accepted tokens to consecutive slots, as if they alone had been read.

        By row, `starts` is the tree's first slot, and `columns` the slots to keep, counted from it and rising. `columns_BA` are
        the same on the device, shorter rows continued by their own places; None: copied there.
        """
        A = max(map(len, columns))
        # A row that keeps fewer copies the other slots onto themselves.
        columns = [[*row, *range(len(row), A)] for row in columns]
        if all(column == place for row in columns for place, column in enumerate(row)):
            return
        # Layers without attention, or that read the keys and values of others, hold none.
        filled = [layer for layer in self.rows if layer.is_initialized]
        if not filled:
            return
        device = filled[0].keys.device
        columns_BA = torch.tensor(columns, device=device) if columns_BA is None else columns_BA.to(device)
        starts = row_ints(starts, device)
        source, goal = _index(starts, columns_BA), _index(starts, torch.arange(A, device=device))
        for layer in filled:
            layer.move(goal, source)

    def keep_rows(self, rows: Rows) -> None:
        for layer, index_B in self._places(rows):
            layer.keep_rows(index_B)
        if self.offsets_B is not None:
            self.offsets_B = self.offsets_B[row_ints(rows, self.offsets_B.device).tensor_B]

    def put_rows(self, places: Sequence[int], other: RowCache) -> None:
        """Put what another cache of the same model holds of its rows, from the first position on, in place of these rows."""
        others = {id(layer): other.rows[number] for number, layer in enumerate(self.rows)}
        for layer, index_B in self._places(places):
            layer.put_rows(index_B, others[id(layer)])
        if self.offsets_B is not None or other.offsets_B is not None:
            (layer, index_B), *_ = self._places(places)
            offsets_B = layer.keys.new_zeros(len(layer.keys), dtype=torch.long) if self.offsets_B is None else self.offsets_B
            self.offsets_B = offsets_B.index_put(
                (index_B,), offsets_B.new_zeros(1) if other.offsets_B is None else other.offsets_B
            )

    def _places(self, rows: Rows) -> list[tuple[RowLayer, Tensor]]:
        """Return the layers that hold anything, each with the places of rows on its device."""
        filled = [layer for layer in self.rows if layer.is_initialized]
        if not filled:
            return []
        index_B = row_ints(rows, filled[0].keys.device).tensor_B
        return [(layer, index_B.to(layer.keys.device)) for layer in filled]


def _index(starts: RowInts, columns: Tensor) -> tuple[Tensor, slice, Tensor]:
    """Return the index of slots `starts[b] + columns` of each row; `columns` is `[T]` or `[B, T]`."""
    starts_B1 = starts.tensor_B.to(columns.device).unsqueeze(1)
    return torch.arange(len(starts), device=columns.device).unsqueeze(1), slice(None), starts_B1 + columns


def _index_on(index: tuple[Tensor, slice, Tensor], states: Tensor) -> tuple[Tensor, slice, Tensor]:
    """Return an index of slots on the device of these states: the layers of a spread target lie on several."""
    rows, heads, positions = index
    return rows.to(states.device), heads, positions.to(states.device)

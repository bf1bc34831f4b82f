"""The cache of models whose layers carry the past in a state: recurrent, linear-attention and convolutional layers.

A state has no positions: what a rejected draft did to it cannot be taken back, so the state after each token is kept until the
next forward says from which tokens its rows go on. For that the modules that have a state (mixers) are run one token at a time,
each from the state of the one before it, in a tree from its parent's; the rest of the model reads all tokens at once. A prompt
is read at once; where its rows are of unequal lengths, the mixers alone read the shorter ones again, from their kept inputs,
when the next forward tells the lengths. transformers' forward of several tokens after a state is not used: that of Mamba, Jamba
and Zamba starts from an empty recurrent state.
B rows, T new tokens, X slots of a tree, D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from heads.device import Rows, on_host, to_device
from heads.inference.kv_cache import RowCache, RowLayer

MAX_STATES = 8  # of one layer while mixers are searched
State = tuple[Tensor | None, ...]  # of a mixer: convolution and recurrence in turns, `[B, ...]` each; None: it has none
Mixer = Callable[[Tensor], Any]  # a mixer's forward as a function of its input `[B, T, D]`


@dataclass(frozen=True)
class MixerSlot:
    """Where a mixer keeps its state: the number of its layer, and which of that layer's states are its own."""

    layer: int
    states: tuple[int, ...] = (0,)


@dataclass
class _History:
    """The states of one mixer: `states[i]` is that after the tokens before position `base[b] + i` of each row b."""

    base: list[int]
    states: list[State]
    prompt: tuple[Mixer, Tensor] | None = None  # read at once, with `states[0]` its end: how to read its beginning again

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.base = [self.base[row] for row in rows]
        self.states = [_rows(state, rows) for state in self.states]
        if self.prompt is not None:
            self.prompt = (self.prompt[0], self.prompt[1][list(rows)])


class RecurrentCache(RowCache):
    """A `RowCache` that also keeps the states of mixers.

    A row may go back to the start of the last forward or to what `keep_states_from` names, and to any later position.
    """

    takes_rows = False  # the histories of a batch begin together

    def __init__(
        self, mixers: dict[nn.Module, MixerSlot], num_layers: int, capacity: int, layer: Callable[[int], RowLayer] = RowLayer
    ) -> None:
        super().__init__(num_layers, capacity, layer)
        self._mixers = mixers
        most = max((max(slot.states) + 1 for slot in mixers.values()), default=MAX_STATES)
        # What a mixer reads and writes while it runs.
        self._now = Cache(layers=[LinearAttentionLayer(number_of_states=most) for _ in range(num_layers)])
        self._histories: dict[nn.Module, _History] = {}
        self._kept_from: list[int] | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._now.get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return self._now.update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._now.get_recurrent_state(layer_idx, state_idx)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return self._now.update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    @contextmanager
    def reading(self) -> Iterator[None]:
        own = {module: vars(module).get("forward") for module in self._mixers}
        for module in own:
            module.forward = partial(self._read, module, module.forward)
        try:
            yield
        finally:
            for module, forward in own.items():
                del module.forward
                if forward is not None:
                    module.forward = forward

    def keep_states_from(self, starts: Sequence[int]) -> None:
        self._kept_from = list(starts)

    def keep_path(self, starts: Rows, columns: Sequence[Sequence[int]], columns_BA: Tensor | None = None) -> None:
        super().keep_path(starts, columns, columns_BA)
        firsts, A = on_host(starts), max(map(len, columns))
        for history in self._histories.values():
            paths = []
            for start, base, row in zip(firsts, history.base, columns, strict=True):
                # A row that keeps fewer gets its last state again, where it does not go on.
                padded = [*row, *[row[-1]] * (A - len(row))]
                paths.append([start - base, *(start - base + 1 + column for column in padded)])
            history.states = [_gather(history.states, step) for step in zip(*paths, strict=True)]
            history.base = list(firsts)

    def keep_rows(self, rows: Rows) -> None:
        super().keep_rows(rows)
        rows = on_host(rows)
        self._kept_from = None if self._kept_from is None else [self._kept_from[row] for row in rows]
        for history in self._histories.values():
            history.keep_rows(rows)

    def _read(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs_BTD = args[0] if args else kwargs.pop("hidden_states")
        mixer: Mixer = lambda part: forward(part, *args[1:], **kwargs)  # noqa: E731
        B, T = inputs_BTD.shape[:2]
        slot, slots = self._mixers[module], self._slots
        if T == 0:
            return inputs_BTD
        if max(slots.starts.host) == 0 and slots.attention is None:
            output, end = self._run(mixer, inputs_BTD, slot, None)
            self._histories[module] = _History(base=[T] * B, states=[end], prompt=(mixer, inputs_BTD))
            return output
        history = self._histories[module]
        self._go_on(history, slots.starts.host, slot)
        before = [start - base for start, base in zip(slots.starts.host, history.base, strict=True)]  # entry of the last state
        if slots.attention is None:
            steps = [[last + t for last in before] for t in range(T)]
        else:
            root, parents = slots.attention.visible_BTX.shape[2] - T, slots.attention.parent_slots
            steps = [[last - root + row[t] for last, row in zip(before, parents, strict=True)] for t in range(T)]
        outputs = []
        for t, entries in enumerate(steps):
            output, state = self._run(mixer, inputs_BTD[:, t : t + 1], slot, _gather(history.states, entries))
            history.states.append(state)
            outputs.append(output)
        return _joined(outputs)

    def _run(self, mixer: Mixer, inputs_BTD: Tensor, slot: MixerSlot, state: State | None) -> tuple[Any, State]:
        """Return a mixer's output for these inputs after `state`, and the state after them."""
        layer = cast(LinearAttentionLayer, self._now.layers[slot.layer])
        state = (None, None) * len(slot.states) if state is None else state
        for index, conv, recurrent in zip(slot.states, state[::2], state[1::2], strict=True):
            # Copies: some mixers write into the state that they are given.
            layer.conv_states[index] = None if conv is None else conv.clone()
            layer.recurrent_states[index] = None if recurrent is None else recurrent.clone()
            layer.is_conv_states_initialized[index] = conv is not None
            layer.is_recurrent_states_initialized[index] = recurrent is not None
            layer.has_previous_state[index] = conv is not None or recurrent is not None
            layer.conv_kernel_size[index] = None if conv is None else conv.shape[-1]
        output = mixer(inputs_BTD)
        parts = [each for index in slot.states for each in (layer.conv_states[index], layer.recurrent_states[index])]
        return output, tuple(parts)

    def _go_on(self, history: _History, starts: Sequence[int], slot: MixerSlot) -> None:
        """Let the history end at `starts`, the positions from which the rows go on."""
        if history.prompt is not None:
            history.states = [self._within_prompt(history, starts, slot)]
            history.base, history.prompt = list(starts), None
            return
        entries = [start - base for start, base in zip(starts, history.base, strict=True)]
        if min(entries) == max(entries) == len(history.states) - 1:
            kept = starts if self._kept_from is None else list(map(min, starts, self._kept_from))
            if (count := min(position - base for position, base in zip(kept, history.base, strict=True))) > 0:
                history.states = history.states[count:]
                history.base = [base + count for base in history.base]
            return
        for row, (start, entry) in enumerate(zip(starts, entries, strict=True)):
            if not 0 <= entry < len(history.states):
                kept = range(history.base[row], history.base[row] + len(history.states))
                raise ValueError(f"row {row} goes on at {start}; states are kept for {kept[0]} to {kept[-1]}")
        history.base, history.states = list(starts), [_gather(history.states, entries)]

    def _within_prompt(self, history: _History, starts: Sequence[int], slot: MixerSlot) -> State:
        assert history.prompt is not None
        mixer, inputs_BTD = history.prompt
        rows = []
        for row, start in enumerate(starts):
            state = _rows(history.states[0], [row])
            if start == 0:
                state = tuple(None if part is None else torch.zeros_like(part) for part in state)
            elif start < inputs_BTD.shape[1]:
                _, state = self._run(mixer, inputs_BTD[row : row + 1, :start], slot, None)
            rows.append(state)
        return _stacked(rows)


def cache_argument(kind: type[nn.Module]) -> str:
    """Return under which name backbones of a class take their cache; Mamba ignores the usual one."""
    return "cache_params" if "cache_params" in inspect.signature(kind.forward).parameters else "past_key_values"


@torch.no_grad()
def find_mixers(backbone: nn.Module, num_layers: int) -> dict[nn.Module, MixerSlot]:
    """Return the modules of a backbone that ask a cache of `num_layers` for states, and where, by reading two tokens."""
    finder = _Finder(num_layers)
    ids_1T = torch.zeros(1, 2, dtype=torch.int64, device=next(backbone.parameters()).device)
    finder.place([0], 2, ids_1T.device)
    handles = []
    for module in backbone.modules():
        handles.append(module.register_forward_pre_hook(lambda module, _: finder.running.append(module)))
        handles.append(module.register_forward_hook(lambda *_: finder.running.pop() and None))
    try:
        backbone(input_ids=ids_1T, use_cache=True, **{cache_argument(type(backbone)): finder})
    finally:
        for handle in handles:
            handle.remove()
    return {module: MixerSlot(layer, tuple(sorted(states))) for (module, layer), states in finder.found.items()}


class _Finder(RecurrentCache):
    """An empty cache that notes which module asks for which states."""

    def __init__(self, num_layers: int) -> None:
        super().__init__({}, num_layers, capacity=8)
        self.running: list[nn.Module] = []
        self.found: dict[tuple[nn.Module, int], set[int]] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._note(layer_idx, state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._note(layer_idx, state_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def _note(self, layer: int, state: int) -> None:
        self.found.setdefault((self.running[-1], layer), set()).add(state)


def _gather(states: Sequence[State], entries: Sequence[int]) -> State:
    distinct = sorted(set(entries))
    if len(distinct) == 1:
        return states[distinct[0]]
    places = [distinct.index(entry) for entry in entries]

    def chosen(parts: Sequence[Tensor | None]) -> Tensor | None:
        found = [part for part in parts if part is not None]
        if not found:
            return None
        device = found[0].device
        return torch.stack(found)[to_device(places, device), torch.arange(len(places), device=device)]

    return tuple(chosen(parts) for parts in zip(*(states[entry] for entry in distinct), strict=True))


def _rows(state: State, rows: Sequence[int]) -> State:
    return tuple(None if part is None else part[list(rows)] for part in state)


def _stacked(rows: Sequence[State]) -> State:
    return tuple(None if parts[0] is None else torch.cat(parts) for parts in zip(*rows, strict=True))


def _joined(outputs: Sequence[Any]) -> Any:
    if isinstance(outputs[0], tuple):
        return tuple(torch.cat(parts, 1) for parts in zip(*outputs, strict=True))
    return torch.cat(list(outputs), 1)

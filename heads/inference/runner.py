"""How a causal LM is run: by which forward, with which masks and positions, and which checks it has passed.

In DeepSeek-V3.2 and Doge each token sees the keys of the highest scores. An indexer's score is a sum of ReLUs, so several may
be exactly 0. Which of equal ones `torch.topk` returns depends on the number of columns: `first_of_equals` makes it the first.
B batch, T new tokens, S cache length, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from configs.runtime.errors import InputError, first_line
from heads.inference.kv_cache import RowCache
from heads.inference.recurrent_cache import MixerSlot, cache_argument, find_mixers

Masks = Tensor | dict[str, Tensor | None] | None
INDEXED = {"indexed_attention", "minimax_m3_sparse", "compressed_sparse_attention"}  # layer types
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma, RecurrentGemma, xLSTM
STATE_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # the last two have keys and values beside a state
WRONG_STATES = {
    "batches": "for rows of unequal lengths in a batch than for each alone; decode one text at a time, with batch_size 1",
    "trees": "for the drafts of a tree than for each path alone; draft chains, with tree null",
}


def backbone(model: PreTrainedModel) -> nn.Module:
    """Return the part of a causal LM, or of a model's text part, that maps token ids to the final, normed hidden states."""
    base = model.base_model if model.config.get_text_config() is model.config else model.get_decoder()
    if base is not model:
        return base
    # Llama 4 names no part of it as its base: take the one that holds the embedding.
    embedding = model.get_input_embeddings()
    holders = (part for part in model.children() if any(module is embedding for module in part.modules()))
    return next((part for part in holders if part is not embedding), base)


def apply_head(head: Callable[[Tensor], Tensor], hidden_BTD: Tensor) -> Tensor:
    """Return raw logits. Some models in 16 bits keep their last states (Mamba) or their head (HY V4) in float32."""
    weight = getattr(head, "weight", None)
    if weight is not None and not torch.is_autocast_enabled(hidden_BTD.device.type):
        hidden_BTD = hidden_BTD.to(weight.dtype)
    return head(hidden_BTD)


class DecodingForward(Protocol):
    """The two halves of a causal LM, without gradients."""

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor, masks: Masks, cache: RowCache) -> Tensor:
        """Return the final, normed hidden states `[B, T, D]`; keys and values are written where `cache` was placed.

        `masks` are bool `[B or 1, 1, T, S]`, true where a token sees a slot, or a dict of these by layer type; None: the tokens
        start a text, or each is one that sees every slot.
        """

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the output matrix applied to final hidden states `[..., D]`, as `[..., V]`."""

    def watch(self, taps: Sequence[int], seen: dict[int, Tensor]) -> None:
        """Store the states h_i of these taps in `seen` at each forward from now on; with no taps, stop that."""


class TransformersForward(DecodingForward):
    """transformers' own modules as a `DecodingForward`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._backbone, self._head = backbone(model), model.get_output_embeddings()
        self._config = model.config.get_text_config()
        self._cache_argument = cache_argument(type(self._backbone))

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor, masks: Masks, cache: RowCache) -> Tensor:
        stored = {self._cache_argument: cache}
        with cache.reading(), first_of_equals(self._config):
            output = self._backbone(input_ids=ids_BT, position_ids=positions_BT, attention_mask=masks, use_cache=True, **stored)
        hidden_BTD: Tensor = output.last_hidden_state
        return hidden_BTD

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        return apply_head(self._head, hidden_BTD)

    def watch(self, taps: Sequence[int], seen: dict[int, Tensor]) -> None:
        """Do nothing: hooks on the modules store these states (`heads.frozen.hidden_states.tapped`)."""


class Collecting(NamedTuple):
    """States that forwards under way leave behind."""

    taps: frozenset[int]
    seen: dict[int, Tensor]  # by tap, of the latest forward
    home: torch.device  # where they are wanted


class Runner:
    """How one model is run."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = ref(model)  # `_RUNNERS` must not keep it alive
        self.forward: DecodingForward | None = None  # in inference mode; None: transformers' own modules
        self.placeholder: int | None = None  # the token that stands for a state of an image or a sound; None: text only
        self.refused: frozenset[str] = frozenset()  # kinds of forwards for which a check found wrong states
        self.passed: set[str] = set()  # names of checks
        self.hooked: set[int] = set()  # taps of which hooks on the blocks collect states (`heads.frozen.hidden_states`)
        self.collects: Collecting | None = None
        self.runs_elsewhere = False  # the blocks have no weights here, since servers run them; no check applies

    @property
    def model(self) -> PreTrainedModel:
        model = self._model()
        assert model is not None
        return model

    @property
    def current(self) -> DecodingForward:
        """The forward to use now: `forward` in inference mode, else transformers' own."""
        return self._transformers if self.forward is None or not torch.is_inference_mode_enabled() else self.forward

    @cached_property
    def _transformers(self) -> TransformersForward:
        return TransformersForward(self.model)

    @cached_property
    def mixers(self) -> dict[nn.Module, MixerSlot]:
        """The modules that carry the past in a state (`heads.inference.recurrent_cache`)."""
        model, config = self.model, self.model.config.get_text_config()
        is_candidate = model._is_stateful or not STATE_LAYERS.isdisjoint(getattr(config, "layer_types", None) or ())
        if not is_candidate or self.runs_elsewhere:
            return {}
        try:
            return find_mixers(backbone(model), config.num_hidden_layers)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as failure:
            raise InputError(
                f"{type(model).__name__} carries the past in states and does not run on a cache of transformers' form "
                f"({first_line(failure)}), so it cannot be decoded here; take a model of another family"
            ) from failure

    def check_forwards(self, *, batches: bool, trees: bool) -> None:
        """Refuse batches or trees where a check has found that the model computes wrong states for them."""
        for kind in self.refused:
            if trees if kind == "trees" else batches:
                raise InputError(f"{type(self.model).__name__} computes other states {WRONG_STATES[kind]}")


_RUNNERS: WeakKeyDictionary[PreTrainedModel, Runner] = WeakKeyDictionary()


def runner_of(model: PreTrainedModel) -> Runner:
    """Return the runner of a model, the same one at every call."""
    runner = _RUNNERS.get(model)
    if runner is None:
        runner = _RUNNERS[model] = Runner(model)
    return runner


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

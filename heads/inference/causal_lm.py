"""A causal LM in its two halves, run a few tokens at a time: token ids to hidden states, and hidden states to logits.

Drafts, losses and the decoder want logits at a few positions only, and transformers offers no such split
(`heads.inference.model_checks.check_split` compares the halves with the whole). The halves are transformers' own modules, or a
`DecodingForward` that was registered for the model after loading (`heads.inference.lean_forward`,
`heads.inference.compiled_forward`); callers need not know which. A registered forward is used in inference mode only, since it
has no gradients, and not for copies of the model.
B batch, T new tokens, S cache length, D width, V vocabulary, W rows of the output head that are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.runtime.errors import InputError, first_line
from heads.inference.attention_masks import Masks, masks_of
from heads.inference.column_positions import (
    by_axis,
    by_position,
    counts_columns,
    first_of_equals,
    rope_limit,
    within_context,
)
from heads.inference.guidance import guidance_of, twice
from heads.inference.kv_cache import RowCache, RowLayer
from heads.inference.media_inputs import MediaInputs, check_text, read_with_media
from heads.inference.packed_rows import knowing_packing
from heads.inference.recurrent_cache import Place, RecurrentCache, cache_argument, find_mixers
from heads.sampling.token_tree import TreeAttention
from heads.sampling.uploads import on_device

SCALING = ("cohere_compass", "granite4_vision", "granite_docling")  # others with images leave out their text part's logit scale
STATE_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # the last two have keys and values beside a state
MIXERS: WeakKeyDictionary[PreTrainedModel, dict[nn.Module, Place]] = WeakKeyDictionary()  # as `mixers_of` found them


def backbone(model: PreTrainedModel) -> nn.Module:
    """Return the part of a causal LM, or of a model's text part, that maps token ids to the final, normed hidden states."""
    base = model.base_model if model.config.get_text_config() is model.config else model.get_decoder()
    if base is not model:
        return base
    # Llama 4 names no part of it as its base: take the one that holds the embedding.
    embedding = model.get_input_embeddings()
    holders = (part for part in model.children() if any(module is embedding for module in part.modules()))
    return next((part for part in holders if part is not embedding), base)


def head_logits(model: HasOutputHead, hidden_BTD: Tensor) -> Tensor:
    """Return the next-token logits `[..., V]` of final hidden states `[..., D]`, soft-capped or scaled as the model does."""
    config = model.config if model.config.model_type not in SCALING else model.config.get_text_config()
    registered = _registered_now(model)
    logits_BTV = _apply(model.get_output_embeddings(), hidden_BTD) if registered is None else registered.logits(hidden_BTD)
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
        if (scale := getattr(config, name, None)) is not None:
            logits_BTV = logits_BTV * scale
    for name in ("logits_scaling", "logits_mup_width_multiplier"):  # Granite, Inkling; HyperCLOVA X multiplies
        if (divisor := getattr(config, name, None)) is not None:
            logits_BTV = logits_BTV * divisor if config.model_type == "hyperclovax" else logits_BTV / divisor
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):  # Gemma, RecurrentGemma, xLSTM
        if (cap := getattr(config.get_text_config(), name, None)) is not None:
            logits_BTV = cap * torch.tanh(logits_BTV / cap)
    return logits_BTV


def _apply(head: Callable[[Tensor], Tensor], hidden_BTD: Tensor) -> Tensor:
    """Return raw logits. Some models in 16 bits keep their last states (Mamba) or their head (HY V4) in float32."""
    weight = getattr(head, "weight", None)
    if weight is not None and not torch.is_autocast_enabled(hidden_BTD.device.type):
        hidden_BTD = hidden_BTD.to(weight.dtype)
    return head(hidden_BTD)


def new_cache(model: PreTrainedModel, capacity: int, layer: Callable[[int], RowLayer] = RowLayer) -> RowCache:
    """Return an empty cache for `model` that holds at least `capacity` positions a row; `layer` as for `RowCache`."""
    size, num_layers = current_forward(model).cache_size(capacity), model.config.get_text_config().num_hidden_layers
    if mixers := mixers_of(model):
        return RecurrentCache(mixers, num_layers, size, layer)
    return RowCache(num_layers, size, layer, copies=1 if guidance_of(model) is None else 2)


def mixers_of(model: PreTrainedModel) -> dict[nn.Module, Place]:
    """Return the modules of a model that carry the past in a state (`heads.inference.recurrent_cache`), searched for once.

    Raises:
        InputError: it may have some, and does not run on a cache of transformers' form.
    """
    if model not in MIXERS:
        config = model.config.get_text_config()
        is_candidate = model._is_stateful or not STATE_LAYERS.isdisjoint(getattr(config, "layer_types", None) or ())
        try:
            found = find_mixers(backbone(model), config.num_hidden_layers) if is_candidate else {}
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as failure:
            raise InputError(
                f"{type(model).__name__} carries the past in states, and does not run on a cache of transformers' form "
                f"({first_line(failure)}), so it cannot be decoded here; take a model of another family"
            ) from failure
        MIXERS[model] = found
    return MIXERS[model]


def forward_rows(
    model: PreTrainedModel,
    cache: RowCache,
    ids_BT: Tensor,
    starts: Sequence[int],
    attention: TreeAttention | None = None,
    media: MediaInputs | None = None,
) -> Tensor:
    """Run a causal LM's backbone on tokens that continue each row at its own position.

    Args:
        cache: keys and values of positions before `starts`; those of the new tokens are added.
        ids_BT: token ids; column t of row b stands at position `starts[b] + t`.
        starts: first position by row. Anything cached at or after it is overwritten or masked.
        attention: the tokens are those of a tree, whose first slots are `starts`.
        media: of the rows, all of which are read from position 0; None: they bring none.

    Returns:
        The final, normed hidden states `[B, T, D]`; position t predicts t + 1 (`head_logits`).

    Raises:
        InputError: a check found that the model computes wrong states for such tokens (`refuse_forwards`), or a text
            is read that is longer than its `rope_limit`.
    """
    T = ids_BT.shape[1]
    _check_served(model, starts, T, attention)
    cache.place(starts, T, ids_BT.device, attention)
    if media is not None:
        states_BTD, cache.offsets_B = read_with_media(model, ids_BT, media, cache)
        return states_BTD
    check_text(model, ids_BT, starts)
    text_B1, places_T = on_device(starts, ids_BT.device).unsqueeze(1), torch.arange(T, device=ids_BT.device)
    positions_BT = text_B1 + places_T if attention is None else attention.positions_BT
    config = model.config.get_text_config()
    masks = masks_of(config, cache, positions_BT, starts, model.dtype)
    positions_BT = cache.moved(within_context(config, positions_BT, max(starts) + T))
    guidance, run = guidance_of(model), current_forward(model)
    if guidance is None:
        return run.hidden(ids_BT, positions_BT, masks, cache)
    positions, masks = cast(Tensor, twice(positions_BT, len(ids_BT))), twice(masks, len(ids_BT))
    return guidance.mixed(run.hidden(guidance.doubled_ids(ids_BT), positions, masks, cache))


def read_documents(
    model: PreTrainedModel, ids_BT: Tensor, packed_positions_BT: Tensor | None, media: MediaInputs | None = None
) -> Tensor:
    """Return the final, normed hidden states `[B, T, D]` of whole rows; padding stands right, where causality alone masks it.

    Args:
        packed_positions_BT: positions from 0 in each document; None: each row is a single one.
        media: of the rows, which are then not packed; None: they bring none.
    """
    if media is not None:
        return read_with_media(model, ids_BT, media)[0]
    check_text(model, ids_BT)
    guidance = guidance_of(model)
    if guidance is not None:
        packed_positions_BT = cast(Tensor | None, twice(packed_positions_BT, len(ids_BT)))
        ids_BT = guidance.doubled_ids(ids_BT)
    apart = {} if packed_positions_BT is None else {"position_ids": by_axis(model.config, packed_positions_BT)}
    with knowing_packing(packed=bool(apart)):
        states_BTD: Tensor = backbone(model)(input_ids=ids_BT, use_cache=False, **apart).last_hidden_state
    return states_BTD if guidance is None else guidance.mixed(states_BTD)


def head_rows(model: PreTrainedModel, token_ids_W: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the rows `[W, D]` of a causal LM's head for these tokens, and their bias `[W]` if it has one; differentiable.

    Raises:
        InputError: the head is no plain linear layer, or has no such rows.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise InputError(f"{type(model).__name__} has a head of type {type(head).__name__}; only a linear one can be reduced")
    if not token_ids_W.is_meta and int(token_ids_W[-1]) >= head.out_features:  # a plan builds heads without any values
        raise InputError(
            f"the draft vocabulary holds token {int(token_ids_W[-1])}; the draft's head has {head.out_features} rows"
        )
    rows = HeadRows.of(model, token_ids_W)
    return rows.weight_WD, rows.bias_W


class HeadRows:
    """Some rows of a causal LM's head (`HasOutputHead`); their logits are scaled or capped as the model does.

    Args:
        config: the model's.
        weight_WD, bias_W: the rows, gathered differentiably: the gradient of `parameters` flows on into the whole head.
    """

    def __init__(self, config: object, weight_WD: Tensor, bias_W: Tensor | None) -> None:
        self.config, self.weight_WD, self.bias_W = config, weight_WD, bias_W

    @classmethod
    def of(cls, model: PreTrainedModel, token_ids_W: Tensor) -> HeadRows:
        """Gather rows that `head_rows` has accepted before: its check makes the host wait for the device."""
        head = model.get_output_embeddings()
        return cls(model.config, head.weight[token_ids_W], None if head.bias is None else head.bias[token_ids_W])

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Every tensor that the logits depend on."""
        return (self.weight_WD,) if self.bias_W is None else (self.weight_WD, self.bias_W)

    def get_output_embeddings(self) -> Callable[[Tensor], Tensor]:
        """Return the linear map from hidden states `[..., D]` to raw logits `[..., W]`."""
        return lambda hidden: functional.linear(hidden.to(self.weight_WD.dtype), self.weight_WD, self.bias_W)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., W]` of final hidden states `[..., D]`."""
        return head_logits(self, hidden)


class HasOutputHead(Protocol):
    """The part of a causal LM's interface that `head_logits` needs."""

    @property
    def config(self) -> Any:
        """Says whether logits are scaled or capped."""

    def get_output_embeddings(self) -> Any:
        """Return the map from hidden states `[..., D]` to raw logits `[..., V]`."""


class DecodingForward(Protocol):
    """The two halves of a causal LM, without gradients."""

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor, masks: Masks, cache: RowCache) -> Tensor:
        """Return the final, normed hidden states `[B, T, D]`; keys and values are written where `cache` was placed.

        Args:
            masks: bool `[B or 1, 1, T, S]`, true where a token sees a slot, or a dict of these by layer type; None: the tokens
                start a text, or each is one that sees every slot.
        """

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the output matrix applied to final hidden states `[..., D]`, as `[..., V]`."""

    def watch(self, taps: Sequence[int], seen: dict[int, Tensor]) -> None:
        """Store the states h_i of these taps in `seen` at each forward from now on; with no taps, stop that."""

    def cache_size(self, capacity: int) -> int:
        """Return how many positions a row of its cache should have room for where `capacity` are needed."""
        return capacity


class TransformersForward(DecodingForward):
    """transformers' own modules as a `DecodingForward`; the one that is used where none is registered."""

    def __init__(self, model: PreTrainedModel) -> None:
        # Not the model itself, which `_REGISTERED` must not keep alive.
        self._backbone, self._head = backbone(model), model.get_output_embeddings()
        self._config = model.config.get_text_config()
        self._cache_argument = cache_argument(type(self._backbone))

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor, masks: Masks, cache: RowCache) -> Tensor:
        own = counts_columns(self._config)
        alone = by_position(self._backbone, positions_BT, cache) if own else first_of_equals(self._config)
        stored, masks = {self._cache_argument: cache}, None if own else masks
        with cache.reading(), alone:
            output = self._backbone(input_ids=ids_BT, position_ids=positions_BT, attention_mask=masks, use_cache=True, **stored)
        hidden_BTD: Tensor = output.last_hidden_state
        return hidden_BTD

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        return _apply(self._head, hidden_BTD)

    def watch(self, taps: Sequence[int], seen: dict[int, Tensor]) -> None:
        """Do nothing: hooks on the modules store these states (`heads.frozen.hidden_states.tapped`)."""


_REGISTERED: WeakKeyDictionary[HasOutputHead, DecodingForward] = WeakKeyDictionary()


def register_forward(model: PreTrainedModel, forward: DecodingForward | None) -> None:
    """Run `model` by `forward` while decoding from now on, or by transformers again where it is None."""
    if forward is None:
        _REGISTERED.pop(model, None)
    else:
        _REGISTERED[model] = forward


def registered_forward(model: PreTrainedModel) -> DecodingForward | None:
    """Return the forward that was registered for `model`; None: transformers' own runs it."""
    return _REGISTERED.get(model)


def current_forward(model: PreTrainedModel) -> DecodingForward:
    """Return the forward to use now: the registered one in inference mode, else transformers' own."""
    return _registered_now(model) or TransformersForward(model)


def _registered_now(model: HasOutputHead) -> DecodingForward | None:
    return _REGISTERED.get(model) if torch.is_inference_mode_enabled() else None


WRONG_STATES = {
    "batches": "for rows of unequal lengths in a batch than for each alone; decode one text at a time, with batch_size 1",
    "trees": "for the drafts of a tree than for each path alone; draft chains, with tree null",
}
_REFUSED: WeakKeyDictionary[PreTrainedModel, frozenset[str]] = WeakKeyDictionary()


def refuse_forwards(model: PreTrainedModel, kinds: frozenset[str]) -> None:
    """Refuse these kinds of forwards (`WRONG_STATES`) of `model` from now on."""
    _REFUSED[model] = kinds


def check_forwards(model: PreTrainedModel, *, batches: bool, trees: bool) -> None:
    """Refuse batches or trees where a check has found that the model computes wrong states for them.

    Raises:
        InputError: one of the two is asked for and refused.
    """
    for kind in _REFUSED.get(model, ()):
        if trees if kind == "trees" else batches:
            raise InputError(f"{type(model).__name__} computes other states {WRONG_STATES[kind]}")


def _check_served(model: PreTrainedModel, starts: Sequence[int], T: int, attention: TreeAttention | None) -> None:
    check_forwards(model, batches=min(starts) != max(starts), trees=attention is not None)
    limit = rope_limit(model.config.get_text_config())
    if limit is not None and max(starts) == 0 and limit < T:  # later, only padding and drafts without room stand behind it
        raise InputError(
            f"{type(model).__name__} changes its rotary embedding (longrope) for texts of more than {limit} tokens, and this "
            f"one has {T}; keep prompt and answer within {limit}, or, for one embedding at every length, set short_factor to "
            "the values of long_factor in its config.json"
        )

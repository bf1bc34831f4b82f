"""How a causal LM is run: by which forward, and which checks it has passed.

B batch, T new tokens, S cache length, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.runtime.errors import InputError, first_line
from heads.inference.kv_cache import RowCache
from heads.inference.masks import Masks, first_of_equals
from heads.inference.recurrent_cache import MixerSlot, cache_argument, find_mixers

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

    @property
    def weights(self) -> Iterable[Tensor]:
        """What it reads that is no module's parameter or buffer."""
        return ()

    def cache_size(self, capacity: int) -> int:
        """Return how many positions a row of its cache should have room for where `capacity` are needed."""
        return capacity


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
        self.row_attention: str | None = None  # transformers' name of the attention that reads whole rows; None: the model's
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

    @contextmanager
    def reading_rows(self) -> Iterator[None]:
        if self.row_attention is None:
            yield
            return
        config: Any = self.model.config.get_text_config()
        own, config._attn_implementation = config._attn_implementation, self.row_attention
        try:
            yield
        finally:
            config._attn_implementation = own

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

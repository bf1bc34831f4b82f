"""A causal LM in its two halves, run a few tokens at a time: token ids to hidden states, and hidden states to logits.

Drafts, losses and the decoder need logits at a few positions only, and transformers offers no such split. The model's `Runner`
says which forward runs it. Images and sounds are read where a row is read from its beginning: its ids hold a placeholder for
each of their states, so that positions, labels and drafts count tokens as in text.
B batch, T new tokens, P tokens of the longest prompt, D width, V vocabulary, W rows of the output head that are wanted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, masking_utils

from configs.runtime.errors import InputError, first_line
from heads.device import Rows, row_ints
from heads.inference.kv_cache import RowCache, RowLayer
from heads.inference.recurrent_cache import RecurrentCache
from heads.inference.runner import CAPS, apply_head, backbone, by_axis, masks_of, rope_limit, runner_of, within_context
from heads.sampling.token_tree import TreeAttention

SCALING = ("cohere_compass", "granite4_vision", "granite_docling")  # others with images leave out their text part's logit scale
_PACKED: ContextVar[bool | None] = ContextVar("packed", default=None)  # of this thread; None: not known
_OWN = masking_utils.find_packed_sequence_indices


@dataclass(frozen=True, kw_only=True)
class MediaInputs:
    """What a processor made of the images or sounds of some rows, by the name of the model's argument."""

    of_media: Mapping[str, Tensor]  # pixels, sizes, features and the like, of all rows' media one after the other
    of_tokens: Mapping[str, Tensor]  # what each token of the prompts is, `[B, P]`; 0 is text


def head_logits(model: HasOutputHead, hidden_BTD: Tensor) -> Tensor:
    """Return the next-token logits `[..., V]` of final hidden states `[..., D]`, soft-capped or scaled as the model does."""
    config = model.config if model.config.model_type not in SCALING else model.config.get_text_config()
    forward = runner_of(model).forward if isinstance(model, PreTrainedModel) and torch.is_inference_mode_enabled() else None
    logits_BTV = apply_head(model.get_output_embeddings(), hidden_BTD) if forward is None else forward.logits(hidden_BTD)
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
        if (scale := getattr(config, name, None)) is not None:
            logits_BTV = logits_BTV * scale
    for name in ("logits_scaling", "logits_mup_width_multiplier"):  # Granite, Inkling; HyperCLOVA X multiplies
        if (divisor := getattr(config, name, None)) is not None:
            logits_BTV = logits_BTV * divisor if config.model_type == "hyperclovax" else logits_BTV / divisor
    for name in CAPS:
        if (cap := getattr(config.get_text_config(), name, None)) is not None:
            logits_BTV = cap * torch.tanh(logits_BTV / cap)
    return logits_BTV


def new_cache(model: PreTrainedModel, capacity: int, layer: Callable[[int], RowLayer] = RowLayer) -> RowCache:
    """Return an empty cache for `model` that holds `capacity` positions a row; `layer` as for `RowCache`."""
    runner, num_layers = runner_of(model), model.config.get_text_config().num_hidden_layers
    if runner.mixers:
        return RecurrentCache(runner.mixers, num_layers, capacity, layer)
    return RowCache(num_layers, capacity, layer)


def forward_rows(
    model: PreTrainedModel,
    cache: RowCache,
    ids_BT: Tensor,
    starts: Rows,
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
    """
    T = ids_BT.shape[1]
    runner, starts = runner_of(model), row_ints(starts, ids_BT.device)
    first, furthest = min(starts.host), max(starts.host)
    runner.check_forwards(batches=first != furthest, trees=attention is not None)
    _check_length(model, furthest, T)
    cache.place(starts, T, ids_BT.device, attention)
    if media is not None:
        states_BTD, cache.offsets_B = _read_with_media(model, ids_BT, media, cache)
        return states_BTD
    if furthest == 0:  # later tokens are an answer's
        _check_text(model, ids_BT)
    text_B1, places_T = starts.tensor_B.unsqueeze(1), torch.arange(T, device=ids_BT.device)
    positions_BT = text_B1 + places_T if attention is None else attention.positions_BT
    config = model.config.get_text_config()
    masks = masks_of(config, cache, positions_BT, starts.host, model.dtype)
    positions_BT = cache.moved(within_context(config, positions_BT, furthest + T))
    return runner.current.hidden(ids_BT, positions_BT, masks, cache)


def read_documents(
    model: PreTrainedModel, ids_BT: Tensor, packed_positions_BT: Tensor | None, media: MediaInputs | None = None
) -> Tensor:
    """Return the final, normed hidden states `[B, T, D]` of whole rows; padding stands right, where causality alone masks it.

    `packed_positions_BT` are positions from 0 in each document; None: each row is a single one, and may have `media`.
    """
    if media is not None:
        return _read_with_media(model, ids_BT, media)[0]
    _check_text(model, ids_BT)
    apart = {} if packed_positions_BT is None else {"position_ids": by_axis(model.config, packed_positions_BT)}
    with knowing_packing(packed=bool(apart)):
        states_BTD: Tensor = backbone(model)(input_ids=ids_BT, use_cache=False, **apart).last_hidden_state
    return states_BTD


@contextmanager
def knowing_packing(*, packed: bool) -> Iterator[None]:
    """Tell transformers whether rows hold several documents: the host would wait for the device to look in the positions."""
    masking_utils.find_packed_sequence_indices = _find  # stays, and does outside of this block what transformers' own does
    token = _PACKED.set(packed)
    try:
        yield
    finally:
        _PACKED.reset(token)


def _find(position_ids: Tensor) -> Tensor | None:
    """Return the number of each position's document in its row, from 0, as transformers computes it; None: one a row."""
    known = _PACKED.get()
    if known is None:
        return _OWN(position_ids)
    if not known:
        return None
    steps_BT = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps_BT != 1).cumsum(-1)


def head_rows(model: PreTrainedModel, token_ids_W: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the rows `[W, D]` of a causal LM's head for these tokens, and their bias `[W]` if it has one; differentiable."""
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
    """Some rows of a causal LM's head (`HasOutputHead`), gathered differentiably; logits are scaled as the model's."""

    def __init__(self, config: object, weight_WD: Tensor, bias_W: Tensor | None) -> None:
        self.config, self.weight_WD, self.bias_W = config, weight_WD, bias_W

    @classmethod
    def of(cls, model: PreTrainedModel, token_ids_W: Tensor) -> HeadRows:
        """Gather rows that `head_rows` has accepted before: its check makes the host wait for the device."""
        head = model.get_output_embeddings()
        return cls(model.config, head.weight[token_ids_W], None if head.bias is None else head.bias[token_ids_W])

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.weight_WD,) if self.bias_W is None else (self.weight_WD, self.bias_W)

    def get_output_embeddings(self) -> Callable[[Tensor], Tensor]:
        """Return the linear map from hidden states `[..., D]` to raw logits `[..., W]`."""
        return lambda hidden: functional.linear(hidden.to(self.weight_WD.dtype), self.weight_WD, self.bias_W)

    def logits(self, hidden: Tensor) -> Tensor:
        return head_logits(self, hidden)


class HasOutputHead(Protocol):
    """What `head_logits` needs of a causal LM: whether logits are scaled or capped, and its linear map to raw ones."""

    @property
    def config(self) -> Any: ...

    def get_output_embeddings(self) -> Any: ...


def _check_text(model: PreTrainedModel, ids_BT: Tensor) -> None:
    """Refuse rows, read from their beginning without media, that hold the placeholder of some."""
    placeholder = runner_of(model).placeholder
    if placeholder is not None and bool((ids_BT == placeholder).any()):
        raise InputError(
            f"a text holds token {placeholder}, which stands for an image or a sound, and is read without one: leave that "
            "token out of texts; docs/modalities.md lists what reads them"
        )


def _read_with_media(
    model: PreTrainedModel, ids_BT: Tensor, media: MediaInputs, cache: RowCache | None = None
) -> tuple[Tensor, Tensor | None]:
    """Read rows from their beginning; also return, for positions by axis, by how much those after the media differ, `[B]`."""
    whole: Any = model.base_model
    T, takes = ids_BT.shape[1], inspect.signature(whole.forward).parameters
    of_tokens = {name: functional.pad(each, (0, T - each.shape[1])) for name, each in media.of_tokens.items()}
    given: dict[str, Any] = {name: each for name, each in {**media.of_media, **of_tokens}.items() if name in takes}
    offsets_B = None
    if hasattr(whole, "get_rope_index"):
        asked = inspect.signature(whole.get_rope_index).parameters
        grids = {name: each for name, each in {**media.of_media, **of_tokens}.items() if name in asked}
        given["position_ids"], offsets_B1 = whole.get_rope_index(ids_BT, **grids)
        offsets_B = offsets_B1.view(-1)
    if cache is not None:
        given["past_key_values"] = cache
    try:
        states_BTD: Tensor = whole(input_ids=ids_BT, use_cache=cache is not None, **given).last_hidden_state
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError) as error:
        raise InputError(f"{type(model).__name__} cannot read these images or sounds: {first_line(error)}") from error
    return states_BTD, offsets_B


def _check_length(model: PreTrainedModel, furthest: int, T: int) -> None:
    limit = rope_limit(model.config.get_text_config())
    if limit is not None and furthest == 0 and limit < T:  # later, only padding and drafts without room stand behind it
        raise InputError(
            f"{type(model).__name__} changes its rotary embedding (longrope) for texts of more than {limit} tokens, and this "
            f"one has {T}; for one embedding at every length set short_factor to the values of long_factor in its config.json"
        )

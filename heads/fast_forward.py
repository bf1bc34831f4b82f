"""Which causal LMs are run by a forward of this project's own, in place of transformers'.

A model is registered once, after loading, by whoever makes its forward (`heads.lean_forward`). From then on the places that
run a model while decoding (`heads.kv_cache.forward_rows`, `heads.lm_head.head_logits`, `heads.target_states.tapped`) find the
forward here, so that the decoder, the drafts and their tests need not know of it. Only inference mode sees it: where
gradients may be asked for, transformers' own modules run. A copy of a model is not registered.
B batch, T new tokens, S cache length, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from heads.kv_cache import RowCache  # which itself looks up forwards here

Masks = Tensor | dict[str, Tensor | None] | None  # as `heads.kv_cache.forward_rows` gives them to a backbone


class FastForward(Protocol):
    """The two halves of a causal LM (`heads.lm_head`), without gradients."""

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor, masks: Masks, cache: RowCache) -> Tensor:
        """Return the final, normed hidden states `[B, T, D]`; keys and values go where `cache` was placed.

        Args:
            ids_BT: token ids.
            positions_BT: where they stand in the text.
            masks: bool `[B or 1, 1, T, S]`, true where a token sees a slot, by layer type where there is a dict; None: the
                tokens start a text, or each is one that sees all.
        """

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the output matrix applied to final hidden states `[..., D]`, as `[..., V]`."""

    def watch(self, taps: Sequence[int], seen: dict[int, Tensor]) -> None:
        """Put the states h_i of these taps into `seen` at each forward from now on; no taps: stop that."""

    def cache_size(self, capacity: int) -> int:
        """Return how many positions a row of its cache should have room for where `capacity` are needed."""


_FORWARDS: WeakKeyDictionary[PreTrainedModel, FastForward] = WeakKeyDictionary()


def register(model: PreTrainedModel, forward: FastForward | None) -> None:
    """Run `model` by `forward` from now on, or by transformers again where it is None."""
    if forward is None:
        _FORWARDS.pop(model, None)
    else:
        _FORWARDS[model] = forward


def is_registered(model: PreTrainedModel) -> bool:
    """Say whether decoding runs `model` by a forward of ours."""
    return model in _FORWARDS


def registered(model: PreTrainedModel) -> FastForward | None:
    """Return the forward that decoding runs `model` by; None: transformers' own."""
    return _FORWARDS.get(model)


def fast_forward(model: PreTrainedModel) -> FastForward | None:
    """Return the forward to use now; None, transformers' own, where there is no other or a gradient may be wanted."""
    return _FORWARDS.get(model) if torch.is_inference_mode_enabled() else None

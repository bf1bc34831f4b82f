"""Which causal LMs are run by a forward of this project's own, in place of transformers'.

A model is registered once, after loading, by whoever makes its forward (`heads.inference.lean_forward`). From then on the
places that run a model while decoding (`heads.inference.kv_cache.forward_rows`, `heads.inference.causal_lm.head_logits`,
`heads.target.hidden_states.tapped`) find the forward here, so that the decoder, the drafts and their tests need not know of
it. Only inference mode sees it: where gradients may be asked for, transformers' own modules run. A copy of a model is not
registered. B batch, T new tokens, S cache length, D width, V vocabulary.


The two halves of a causal LM: the backbone that makes hidden states, and the head that makes logits of them.

Kept apart because drafts, losses and the decoder want logits at a few positions only. transformers offers no such split,
so `check_split` proves on a probe that the halves together are the model. B batch, T positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.runtime.errors import InputError


def backbone(model: PreTrainedModel) -> nn.Module:
    """Return the part of a causal LM that maps token ids to the final, normed hidden states."""
    return model.base_model


def head_logits(model: PreTrainedModel, hidden_BTD: Tensor) -> Tensor:
    """Return the next-token logits `[..., V]` of final hidden states `[..., D]`, soft-capped or scaled as the model does."""
    config = model.config
    fast = fast_forward(model)
    logits_BTV = model.get_output_embeddings()(hidden_BTD) if fast is None else fast.logits(hidden_BTD)
    if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
        logits_BTV = logits_BTV * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits_BTV = logits_BTV / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
        logits_BTV = cap * torch.tanh(logits_BTV / cap)
    return logits_BTV


@torch.inference_mode()
def check_split(model: PreTrainedModel) -> None:
    """Refuse a model whose logits are no numbers, or not `head_logits` of its backbone's last hidden state.

    Raises:
        InputError: the logits of a probe are not finite, or the two disagree on it by more than rounding.
    """
    ids_BT = torch.arange(1, 9, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size
    whole_BTV = model(input_ids=ids_BT, use_cache=False).logits.float()
    hidden_BTD = backbone(model)(input_ids=ids_BT, use_cache=False).last_hidden_state
    halves_BTV = head_logits(model, hidden_BTD).float()
    name = type(model).__name__
    if not bool(torch.isfinite(whole_BTV).all()):
        raise InputError(f"{name} computes logits that are not finite in {model.dtype}: its weights are damaged or overflow")
    tolerance = 8 * torch.finfo(hidden_BTD.dtype).eps * whole_BTV.abs().max()
    if whole_BTV.shape != halves_BTV.shape or (whole_BTV - halves_BTV).abs().max() > tolerance:
        raise InputError(
            f"{name} computes its logits in a way draftsmith does not know: its head applied to its last hidden state differs"
        )


if TYPE_CHECKING:
    from heads.inference.kv_cache import RowCache  # which itself looks up forwards here

Masks = Tensor | dict[str, Tensor | None] | None  # as `heads.inference.kv_cache.forward_rows` gives them to a backbone


class FastForward(Protocol):
    """The two halves of a causal LM (`heads.inference.causal_lm`), without gradients."""

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

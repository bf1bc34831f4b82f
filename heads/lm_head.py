"""The two halves of a causal LM: the backbone that makes hidden states, and the head that makes logits of them.

Kept apart because drafts, losses and the decoder want logits at a few positions only. transformers offers no such split,
so `check_split` proves on a probe that the halves together are the model. B batch, T positions, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.errors import InputError
from heads.fast_forward import fast_forward


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

"""Activation checkpointing: a draft's layers keep their inputs alone for the backward, and run again in it.

Keys that a layer hands on to later depths are its output too, and are kept. What a layer notes for later (`next` of
`heads.families.eagle3.UnrolledKeys`) it notes again, the same, when it is run again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from configs.runtime.errors import ConfigError


class HeadLayer(GradientCheckpointingLayer):
    """A part of a head that runs as one under activation checkpointing, and a unit of FSDP2."""

    _gradient_checkpointing_func: Callable[..., Any]


def checkpoint_activations(draft: nn.Module) -> None:
    """Turn activation checkpointing on for the training of a head or a draft LM.

    Raises:
        ConfigError: the draft LM is of a family whose blocks transformers cannot run again.
    """
    if isinstance(draft, PreTrainedModel):
        if not draft.supports_gradient_checkpointing:
            raise ConfigError(f"schedule.activation_checkpointing: {type(draft).__name__} has none; set it to null")
        draft.activation_checkpointing_enable()
    for layer in draft.modules():
        if isinstance(layer, HeadLayer):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

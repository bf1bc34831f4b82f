"""The shape of a head's layers: the target's, with the sizes that the settings name.

A target's config names its sizes differently from family to family; where it does not name one, its modules tell.
I width of the MLP, D width of a state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from configs.runtime.errors import InputError
from configs.schema.heads import LayerSettings
from heads.frozen.hidden_states import blocks

# Kinds of rotary embeddings whose frequencies do not depend on the text's length, which a cache of rotated keys needs.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes of a draft layer."""

    width: int
    mlp_width: int
    num_heads: int
    num_key_value_heads: int
    head_width: int
    norm_epsilon: float
    rope_theta: float
    max_positions: int
    rope_scaling: Mapping[str, Any] | None = None  # further rope parameters than theta; None: plain rotary embeddings

    def llama_config(self) -> LlamaConfig:
        """Return the config of a Llama layer of this shape."""
        return LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.mlp_width,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_width,
            rms_norm_eps=self.norm_epsilon,
            max_position_embeddings=self.max_positions,
            rope_parameters=self.rope_parameters,
        )

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """What describes the rotary embedding, as configs of transformers spell it."""
        return {"rope_type": "default"} | dict(self.rope_scaling or {}) | {"rope_theta": self.rope_theta}


def shape_like(target: PreTrainedModel) -> LayerShape:
    """Return the shape of the target's own blocks, whatever its family calls the numbers."""
    config = target.config.get_text_config()
    num_heads = number_of(config, "num_attention_heads") or 1
    rope = getattr(config, "rope_parameters", None) or {}
    nested = rope.get("full_attention")  # Gemma keeps one set of parameters for each kind of layer
    theta = (nested if isinstance(nested, dict) else rope).get("rope_theta", 10_000.0)
    return LayerShape(
        width=config.hidden_size,
        mlp_width=mlp_width(target),
        num_heads=num_heads,
        num_key_value_heads=number_of(config, "num_key_value_heads") or num_heads,
        head_width=number_of(config, "head_dim") or config.hidden_size // num_heads,
        norm_epsilon=getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_eps", None) or 1e-5,
        rope_theta=theta,
        max_positions=longest_text(config),
    )


def layer_shape(target: PreTrainedModel, settings: LayerSettings | None) -> LayerShape:
    """Return the shape of a head's layers: the target's, with the sizes that the settings name.

    Raises:
        InputError: heads that cannot share keys, or rotary embeddings of a kind that heads do not have.
    """
    own = shape_like(target)
    if settings is None:
        return own
    shape = replace(own, **{name: value for name, value in settings.model_dump().items() if value is not None})
    if shape.num_heads % shape.num_key_value_heads or shape.width % shape.num_heads:
        raise InputError(
            f"head.layer: {shape.num_heads} heads and {shape.num_key_value_heads} key-value heads at width {shape.width}; "
            "num_heads must be a multiple of num_key_value_heads, the width one of num_heads"
        )
    if (kind := shape.rope_parameters["rope_type"]) not in ROPE_TYPES:
        raise InputError(f"head.layer.rope_scaling: rotary embeddings of type {kind}; heads have {', '.join(ROPE_TYPES)}")
    return shape


def check_widths(target: PreTrainedModel) -> None:
    """Refuse a target whose embedding or output head has another width than its states, which heads read and write.

    Raises:
        InputError: it has, as OPT-350m.
    """
    width, head = target.config.get_text_config().hidden_size, target.get_output_embeddings()
    widths = {cast(nn.Embedding, target.get_input_embeddings()).weight.shape[1]}
    if isinstance(head, nn.Linear):  # another kind is refused by `heads.inference.causal_lm.head_rows`
        widths.add(head.in_features)
    if not widths <= {width}:
        raise InputError(
            f"{type(target).__name__} has states of width {width} and an embedding or output head of width "
            f"{', '.join(map(str, sorted(widths - {width})))}: heads need one width; distil a draft LM, or take another target"
        )


def mlp_width(target: PreTrainedModel) -> int:
    """Return the width of the target's MLPs; of several the most common one.

    Raises:
        InputError: neither its config nor its linear layers tell.
    """
    config = target.config.get_text_config()
    if (named := number_of(config, "intermediate_size")) is not None:
        return named
    # The last layer of an MLP leads from I back to D; other layers that end in D are no wider.
    inputs = [_num_inputs(module, config.hidden_size) for module in blocks(target).modules()]
    if not any(inputs):
        raise InputError(
            f"{type(target).__name__} has neither an intermediate_size in its config nor an MLP of linear layers, so the "
            "width of a head's MLP does not follow from it: heads that have layers of their own cannot be made for it"
        )
    return max(inputs)


def number_of(config: Any, name: str) -> int | None:
    """Return a whole number of a config, where blocks differ in it the most common one; None where there is none."""
    values = [getattr(each, name, None) for each in config.per_layer_config]  # one config a block
    for number, value in enumerate(values):
        if isinstance(value, list | tuple) and len(value) == len(values):
            values[number] = value[number]
    numbers = Counter(value for value in values if isinstance(value, int) and value > 0)
    return numbers.most_common(1)[0][0] if numbers else None


def longest_text(config: Any) -> int:
    """Return how many positions a target's config names; where it names none (ALiBi), a number that decides nothing."""
    return number_of(config, "max_position_embeddings") or number_of(config, "max_seq_len") or 2048


def _num_inputs(module: nn.Module, width: int) -> int:
    """Return how many features a linear layer reads that gives `width`; 0 for other modules."""
    if isinstance(module, nn.Linear) and module.out_features == width:
        return module.in_features
    return module.nx if isinstance(module, Conv1D) and module.nf == width else 0

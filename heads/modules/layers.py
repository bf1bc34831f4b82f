"""The layers that heads are built from: Llama's decoder layer in parts, of the target's sizes or of those that settings name.

One kind of each whatever the target's family, so that serving engines know it. The decoder layer's input may have any width and
its keys may come from elsewhere; angles and MLP are transformers' own. What attention reads is the caller's: each family hides
other things. Targets' configs name their sizes differently; where one does not, its modules tell.
B batch, T positions, S keys, D width, I width of the MLP, N heads, M key-value heads, H head width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding
from transformers.pytorch_utils import Conv1D

from configs.runtime.errors import ConfigError, InputError
from configs.schema.heads import LayerSettings
from heads.frozen.hidden_states import blocks
from heads.inference.lean_forward import PackedLinear, angles, normed, turned

# Kinds of rotary embeddings whose frequencies do not depend on the text's length, which a cache of rotated keys needs.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

Rotation = tuple[Tensor, Tensor]  # cosines, and sines signed for a rolled head, [B, T, H]


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
    return LayerShape(
        width=config.hidden_size,
        mlp_width=mlp_width(target),
        num_heads=num_heads,
        num_key_value_heads=number_of(config, "num_key_value_heads") or num_heads,
        head_width=number_of(config, "head_dim") or config.hidden_size // num_heads,
        norm_epsilon=getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_eps", None) or 1e-5,
        rope_theta=(nested if isinstance(nested, dict) else rope).get("rope_theta", 10_000.0),
        # Where the config names none (ALiBi), a number that decides nothing.
        max_positions=number_of(config, "max_position_embeddings") or number_of(config, "max_seq_len") or 2048,
    )


def layer_shape(target: PreTrainedModel, settings: LayerSettings | None) -> LayerShape:
    """Return the shape of a head's layers: the target's, with the sizes that the settings name."""
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


def mlp_width(target: PreTrainedModel) -> int:
    """Return the width of the target's MLPs; of several the most common one."""
    config = target.config.get_text_config()
    if (named := number_of(config, "intermediate_size")) is not None:
        return named
    # The last layer of an MLP leads from I back to D; other layers that end in D are no wider.
    modules, D = list(blocks(target).modules()), config.hidden_size
    linear = [each.in_features for each in modules if isinstance(each, nn.Linear) and each.out_features == D]
    inputs = [*linear, *(each.nx for each in modules if isinstance(each, Conv1D) and each.nf == D)]
    if not inputs:
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


class HeadLayer(GradientCheckpointingLayer):
    """A part of a head that runs as one under activation checkpointing, and a unit of FSDP2.

    Run again in the backward, it notes again, the same, what later depths read (`heads.modules.attention.RowKeys`).
    """

    _gradient_checkpointing_func: Callable[..., Any]


class Rotary(nn.Module):
    """The rotary embedding of a draft layer; has no weights."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        # In a tuple: a head served in bfloat16 must not round the frequencies, which turns far positions by the wrong angle.
        self._embedding = (LlamaRotaryEmbedding(shape.llama_config()),)
        self._kept: Tensor | None = None  # of the first positions, [S, 2 * H]

    def forward(self, like: Tensor, position_ids_BT: Tensor) -> Rotation:
        (embedding,) = self._embedding
        return angles(embedding.to(like.device), like, position_ids_BT)

    def keep(self, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        """Keep the angles of so many positions for `drafting`."""
        kept = self._kept
        if kept is None or len(kept) < num_positions or kept.dtype != dtype or kept.device != device:
            positions_1S = torch.arange(num_positions, device=device).unsqueeze(0)
            (self._kept,) = torch.cat(self(torch.empty(0, dtype=dtype, device=device), positions_1S), -1)

    def drafting(self, position_ids_BT: Tensor) -> Rotation:
        """Return the same for positions that were kept, in one launch."""
        assert self._kept is not None, "a draft keeps its positions when it starts"
        cos_BTH, sin_BTH = self._kept[position_ids_BT].chunk(2, -1)
        return cos_BTH, sin_BTH


def rotated(heads_BNTH: Tensor, rotation: Rotation) -> Tensor:
    return turned(heads_BNTH, *(each_BTH.unsqueeze(1) for each_BTH in rotation))


class DraftAttention(nn.Module):
    """Grouped-query attention from queries over a state of `input_width`, which may be twice the layer's width."""

    def __init__(self, shape: LayerShape, input_width: int, *, norm_heads: bool = False) -> None:
        super().__init__()
        N, M, H = shape.num_heads, shape.num_key_value_heads, shape.head_width
        self.head_width = H
        self.q_proj = nn.Linear(input_width, N * H, bias=False)
        self.k_proj = nn.Linear(input_width, M * H, bias=False)
        self.v_proj = nn.Linear(input_width, M * H, bias=False)
        self.o_proj = nn.Linear(N * H, shape.width, bias=False)
        self.q_norm = RMSNorm(H, shape.norm_epsilon) if norm_heads else nn.Identity()
        self.k_norm = RMSNorm(H, shape.norm_epsilon) if norm_heads else nn.Identity()
        self._joined: PackedLinear | None = None

    def join(self) -> Sequence[nn.Module]:
        layers = [self.q_proj, self.k_proj, self.v_proj]
        self._joined = PackedLinear(layers)
        return layers

    def queries(self, states_BTX: Tensor, rotation: Rotation) -> Tensor:
        """Return rotated queries `[B, N, T, H]`."""
        return rotated(self.q_norm(self._heads(self.q_proj(states_BTX))).transpose(1, 2), rotation)

    def keys_values(self, states_BTX: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values, `[B, M, T, H]` each."""
        k_BMTH = self.k_norm(self._heads(self.k_proj(states_BTX))).transpose(1, 2)
        return rotated(k_BMTH, rotation), self._heads(self.v_proj(states_BTX)).transpose(1, 2)

    def project(self, states_BTX: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the same positions, as those two do."""
        if self._joined is None:
            return self.queries(states_BTX, rotation), *self.keys_values(states_BTX, rotation)
        heads_BTYH, H = self._heads(self._joined(states_BTX)), self.head_width
        M = self.k_proj.out_features // H
        turned_BTYH, v_BTMH = heads_BTYH.split([heads_BTYH.shape[2] - M, M], 2)
        if not isinstance(self.q_norm, nn.Identity):
            q_BTNH, k_BTMH = turned_BTYH.split([turned_BTYH.shape[2] - M, M], 2)
            turned_BTYH = torch.cat([self.q_norm(q_BTNH), self.k_norm(k_BTMH)], 2)
        turned_BYTH = rotated(turned_BTYH.transpose(1, 2), rotation)
        q_BNTH, k_BMTH = turned_BYTH.split([turned_BYTH.shape[1] - M, M], 1)
        return q_BNTH, k_BMTH, v_BTMH.transpose(1, 2)

    def output(self, mixed_BNTH: Tensor) -> Tensor:
        """Return mixed values `[B, N, T, H]` projected to `[B, T, D]`."""
        return self.o_proj(mixed_BNTH.transpose(1, 2).flatten(2))

    def _heads(self, projected_BTX: Tensor) -> Tensor:
        return projected_BTX.unflatten(-1, (-1, self.head_width))


class DraftMLP(LlamaMLP):
    """Llama's MLP, whose first two layers can run as one."""

    _joined: PackedLinear | None = None

    def join(self) -> Sequence[nn.Module]:
        self._joined = PackedLinear([self.gate_proj, self.up_proj])
        return [self.gate_proj, self.up_proj]

    def forward(self, states: Tensor) -> Tensor:
        if self._joined is None:
            return cast(Tensor, super().forward(states))
        gate, up = self._joined(states).chunk(2, -1)
        return cast(Tensor, self.down_proj(self.act_fn(gate) * up))


class RMSNorm(nn.Module):
    """Llama's norm (`heads.inference.lean_forward.normed`)."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, values: Tensor) -> Tensor:
        return normed(values, self.weight, self.epsilon)


def mlp(shape: LayerShape) -> nn.Module:
    return DraftMLP(shape.llama_config())


def norm(shape: LayerShape) -> nn.Module:
    return RMSNorm(shape.width, shape.norm_epsilon)


class LayerKeys(Protocol):
    """What the queries of one layer see."""

    def of_queries(self, values_BTX: Tensor) -> Tensor:
        """Return the values of those positions that have queries: all."""
        return values_BTX

    def attend(self, attention: DraftAttention, states_BTX: Tensor, rotation: Rotation) -> Tensor:
        """Return the attention output `[B, T, D]` of new positions."""


class DraftLayer(HeadLayer):
    """A Llama layer, or with `norm_heads` one as Qwen3's."""

    def __init__(self, shape: LayerShape, *, norm_heads: bool = False) -> None:
        super().__init__()
        self.input_layernorm = norm(shape)
        self.self_attn = DraftAttention(shape, shape.width, norm_heads=norm_heads)
        self.post_attention_layernorm = norm(shape)
        self.mlp = mlp(shape)

    def forward(self, states_BTD: Tensor, rotation: Rotation, keys: LayerKeys) -> Tensor:
        states_BTD = states_BTD + keys.attend(self.self_attn, self.input_layernorm(states_BTD), rotation)
        return states_BTD + self.mlp(self.post_attention_layernorm(states_BTD))


def checkpoint_activations(draft: nn.Module) -> None:
    """Turn activation checkpointing on for the training of a head or a draft LM."""
    if isinstance(draft, PreTrainedModel):
        if not draft.supports_gradient_checkpointing:
            raise ConfigError(f"schedule.activation_checkpointing: {type(draft).__name__} has none; set it to null")
        draft.activation_checkpointing_enable()
    for layer in draft.modules():
        if isinstance(layer, HeadLayer):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

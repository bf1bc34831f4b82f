"""A forward for Llama-like models with little overhead, for decoding with `heads.inference.kv_cache.RowCache`.

Heads share its norms, turned queries and keys, and packed layers.

Linear layers are joined where they share their input, and packed as oneDNN reads them fastest on a CPU. Decoding reads every
weight once for a handful of rows, and oneDNN's blocked form, a second copy, is read at nearly twice the speed of plain rows
(SmolLM2's blocks in bfloat16, one thread: 8.5 ms against 16.8). The query heads of a group are further rows of their key head,
so that attention on a CPU reads keys and values once for the group. Every rounding is done where transformers does it, in the
same order.
B batch, T new tokens, S cache length, D width, H head width, N key-value heads, G query heads of each, M query and key heads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from configs.runtime.errors import InputError
from heads.device import keeps_small_tensors_near
from heads.inference.causal_lm import forward_rows, head_logits, new_cache
from heads.inference.kv_cache import RowCache
from heads.inference.model_checks import check_on_probe, probe_ids, relative_error
from heads.inference.runner import DecodingForward, Masks, backbone, runner_of

# Rows the form is chosen for. It serves any number; in float32, forms chosen for fewer than four rows sum in another order for
# one row than for several, and then a near tie may fall differently in plain and in speculative decoding.
ROWS = 4


@runtime_checkable
class Joins(Protocol):
    """A module with linear layers that can run as one."""

    def join(self) -> Sequence[nn.Module]:
        """Let them run joined from now on, and return them."""


def pack(module: nn.Module) -> None:
    """Let the linear layers of a frozen module run joined and packed; their weights must not change afterwards."""
    joined = {id(layer) for part in module.modules() if isinstance(part, Joins) for layer in part.join()}
    for part in module.modules():
        if type(part) is nn.Linear and id(part) not in joined:
            packed = PackedLinear([part])
            if packed.is_packed:
                part.forward = packed  # type: ignore[method-assign, assignment]


class PackedLinear:
    """Some frozen linear layers with the same input as one function; their outputs are concatenated, `[..., O]`.

    Where oneDNN has no blocked form, layers are joined in plain rows, of which their own weights are views from then on.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        weights = [layer.weight.detach() for layer in layers]
        self.weight_OI = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.bias_O: Tensor | None = None
        if any(layer.bias is not None for layer in layers):
            self.bias_O = torch.cat(
                [
                    weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach()
                    for layer, weight in zip(layers, weights, strict=True)
                ]
            )
        is_known = self.weight_OI.device.type == "cpu" and torch.backends.mkldnn.is_available()
        supports_bfloat16 = is_known and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        self.is_packed = is_known and (
            self.weight_OI.dtype == torch.float32 or (self.weight_OI.dtype == torch.bfloat16 and supports_bfloat16)
        )
        if self.is_packed:
            self.weight_OI = torch.ops.mkldnn._reorder_linear_weight(self.weight_OI.contiguous(), ROWS)
        elif len(weights) > 1:
            for layer, rows in zip(layers, self.weight_OI.split([len(weight) for weight in weights]), strict=True):
                layer.weight.data = rows

    def __call__(self, input_: Tensor) -> Tensor:
        if self.is_packed:
            output: Tensor = torch.ops.mkldnn._linear_pointwise(input_, self.weight_OI, self.bias_O, "none", [], "")
            return output
        return nn.functional.linear(input_, self.weight_OI, self.bias_O)


def normed(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm over the last dimension; as in transformers the weight multiplies values rounded to their dtype."""
    return functional.rms_norm(values, values.shape[-1:], None, epsilon) * weight


def angles(embedding: Callable[..., tuple[Tensor, Tensor]], like: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of transformers' rotary embedding, `[B, T, H]`, the sines signed for a rolled head."""
    cos_BTH, sin_BTH = embedding(like, positions_BT)
    first_BTX, second_BTX = sin_BTH.chunk(2, -1)
    return cos_BTH, torch.cat([-first_BTX, second_BTX], -1)


def turned(heads: Tensor, cosines: Tensor, signed_sines: Tensor) -> Tensor:
    """Return queries or keys `[..., H]` turned by angles of a shape that goes with theirs."""
    return heads * cosines + heads.roll(heads.shape[-1] // 2, -1) * signed_sines


log = logging.getLogger("draftsmith")

FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
PROBE_TOKENS = 12
MEMORY_SHARE = 0.5  # of the free memory that packed weights, a copy, may take


def make_lean(model: PreTrainedModel) -> None:
    """Let decoding run `model` by a lean forward, or refuse it; its weights must not change afterwards."""
    runner = runner_of(model)
    runner.forward = LeanForward(model)
    try:
        check_on_probe(
            model,
            _logits_error,
            differs=f"the lean forward of {type(model).__name__} differs from transformers' by {{:.2g}} of its logits on a "
            "probe, which is more than rounding; set target.forward to transformers",
        )
    except InputError:
        runner.forward = None
        raise


def make_fastest(model: PreTrainedModel) -> None:
    """Let decoding run `model` by the fastest forward that its family and the memory have."""
    try:
        if (
            not keeps_small_tensors_near(model.device)
            or model.get_memory_footprint() < MEMORY_SHARE * psutil.virtual_memory().available
        ):
            make_lean(model)
    except InputError as error:
        log.info("%s", error)
    log.info("target.forward auto: %s", forward_name(model))


def forward_name(model: PreTrainedModel) -> str:
    """Return what decoding runs `model` by, as `target.forward` has it."""
    return "transformers" if runner_of(model).forward is None else "lean"


def run_alike(model: PreTrainedModel, target: PreTrainedModel) -> None:
    """Give `model` the kind of forward that `target` has; raises as `make_lean` does."""
    if runner_of(target).forward is not None:
        make_lean(model)


class _Block:
    def __init__(self, layer: Any, layer_type: str, num_kv: int, group: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_type, self.activation = layer_type, mlp.act_fn
        self.input_norm_D = layer.input_layernorm.weight.detach()
        self.mlp_norm_D = layer.post_attention_layernorm.weight.detach()
        self.qkv = PackedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = PackedLinear([attention.o_proj])
        self.gate_up, self.down = PackedLinear([mlp.gate_proj, mlp.up_proj]), PackedLinear([mlp.down_proj])
        self.qk_norm_MH: Tensor | None = None  # Qwen3: the norms of queries and keys, by head
        norms = dict(attention.named_children())
        if "q_norm" in norms:
            query_H, key_H = (norms[name].weight.detach() for name in ("q_norm", "k_norm"))
            self.qk_norm_MH = torch.stack([query_H] * (num_kv * group) + [key_H] * num_kv)


class LeanForward(DecodingForward):
    """The two halves of a Llama-like model as functions without gradients."""

    def __init__(self, model: PreTrainedModel) -> None:
        if not isinstance(model, FAMILIES) or model.config._attn_implementation != "sdpa":
            known = ", ".join(family.__name__.removesuffix("ForCausalLM") for family in FAMILIES)
            raise InputError(
                f"the lean forward knows {known} with target.attention sdpa, not {type(model).__name__} with "
                f"{model.config._attn_implementation}; set target.forward to transformers"
            )
        for path, module in backbone(model).named_modules():
            if path.endswith("_proj") and type(module) is not nn.Linear:
                raise InputError(
                    f"the lean forward packs plain linear layers, and {path} is a {type(module).__name__}; set target.forward "
                    "to transformers"
                )
        config: Any = model.config
        parts: dict[str, Any] = dict(backbone(model).named_children())
        attention = parts["layers"][0].self_attn
        self._head_width, self._scale = attention.head_dim, attention.scaling
        self._num_kv = config.num_key_value_heads
        self._group = config.num_attention_heads // self._num_kv
        self._eps = config.rms_norm_eps
        self._embed, self._rotary, self._norm_D = parts["embed_tokens"], parts["rotary_emb"], parts["norm"].weight.detach()
        types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self._blocks = [
            _Block(layer, kind, self._num_kv, self._group) for layer, kind in zip(parts["layers"], types, strict=True)
        ]
        output: Any = model.get_output_embeddings()
        self._head = PackedLinear([output])
        self._watched: dict[int, Tensor] = {}
        self._taps: frozenset[int] = frozenset()

    def watch(self, taps: Sequence[int], seen: dict[int, Tensor]) -> None:
        self._taps, self._watched = frozenset(taps), seen

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        return self._head(hidden_BTD)

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor, masks: Masks, cache: RowCache) -> Tensor:
        hidden_BTD = self._embed(ids_BT)
        cos_BTH, sin_BTH = angles(self._rotary, hidden_BTD, positions_BT)
        rotation = cos_BTH.unsqueeze(2), sin_BTH.unsqueeze(2)  # for all heads
        kinds = {block.layer_type for block in self._blocks}
        by_type = masks if isinstance(masks, dict) else dict.fromkeys(kinds, masks)
        # A row for each query head of a group, [B or 1, 1, G * T, S].
        by_type = {kind: None if mask is None else mask.repeat(1, 1, self._group, 1) for kind, mask in by_type.items()}
        for number, block in enumerate(self._blocks):
            if number in self._taps:
                self._watched[number] = hidden_BTD
            attended_BTD = self._attention(block, number, hidden_BTD, rotation, by_type[block.layer_type], cache)
            hidden_BTD = hidden_BTD + attended_BTD
            gate_BTI, up_BTI = block.gate_up(normed(hidden_BTD, block.mlp_norm_D, self._eps)).chunk(2, -1)
            hidden_BTD = hidden_BTD + block.down(block.activation(gate_BTI) * up_BTI)
        if len(self._blocks) in self._taps:
            self._watched[len(self._blocks)] = hidden_BTD
        return normed(hidden_BTD, self._norm_D, self._eps)

    def _attention(
        self,
        block: _Block,
        number: int,
        hidden_BTD: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask_BRS: Tensor | None,
        cache: RowCache,
    ) -> Tensor:
        B, T, _ = hidden_BTD.shape
        N, G, H = self._num_kv, self._group, self._head_width
        qkv_BTMH = block.qkv(normed(hidden_BTD, block.input_norm_D, self._eps)).view(B, T, (G + 2) * N, H)
        qk_BTMH, values_BTNH = qkv_BTMH.split(((G + 1) * N, N), 2)
        if block.qk_norm_MH is not None:
            qk_BTMH = normed(qk_BTMH, block.qk_norm_MH, self._eps)
        qk_BTMH = turned(qk_BTMH, *rotation)
        queries_BTMH, keys_BTNH = qk_BTMH.split((G * N, N), 2)
        keys_BNSH, values_BNSH = cache.rows[number].update(keys_BTNH.transpose(1, 2), values_BTNH.transpose(1, 2))
        if mask_BRS is None and T > 1:  # the beginning of a text
            attended_BMTH = scaled_dot_product_attention(
                queries_BTMH.transpose(1, 2), keys_BNSH, values_BNSH, is_causal=True, scale=self._scale, enable_gqa=G > 1
            )
            return block.out(attended_BMTH.transpose(1, 2).reshape(B, T, G * N * H))
        queries_BNRH = queries_BTMH.view(B, T, N, G, H).permute(0, 2, 3, 1, 4).reshape(B, N, G * T, H)
        attended_BNRH = scaled_dot_product_attention(
            queries_BNRH, keys_BNSH, values_BNSH, attn_mask=mask_BRS, scale=self._scale
        )
        return block.out(attended_BNRH.view(B, N, G, T, H).permute(0, 3, 1, 2, 4).reshape(B, T, G * N * H))


def _logits_error(model: PreTrainedModel) -> float:
    """Compare lean logits of a probe with transformers'; read in two pieces, the second as after a rejected draft."""
    ids_BT = probe_ids(model, 2, PROBE_TOKENS)
    whole_BTV = model(input_ids=ids_BT, use_cache=False).logits
    starts, T = (PROBE_TOKENS - 5, PROBE_TOKENS - 8), 5
    with torch.inference_mode():
        cache = new_cache(model, PROBE_TOKENS)
        forward_rows(model, cache, ids_BT[:, : starts[0]], [0, 0])
        again_BT = torch.stack([row[start : start + T] for row, start in zip(ids_BT, starts, strict=True)])
        lean_BTV = head_logits(model, forward_rows(model, cache, again_BT, starts))
        return relative_error(
            lean_BTV, torch.stack([row[start : start + T] for row, start in zip(whole_BTV, starts, strict=True)])
        )

"""What the lean forward and heads compute alike of a Llama layer: norms, turned queries and keys, packed linear layers.

Linear layers are joined where they share their input, and packed as oneDNN reads them fastest on a CPU. Decoding reads every
weight once for a handful of rows, and oneDNN's blocked form, a second copy, is read at nearly twice the speed of plain rows
(SmolLM2's blocks in bfloat16, one thread: 8.5 ms against 16.8).
O outputs, I inputs, B batch, T positions, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

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

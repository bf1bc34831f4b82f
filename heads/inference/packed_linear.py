"""Linear layers in the memory layout that the CPU's matrix kernels read fastest, several joined into one.

Decoding reads every weight once for a handful of rows, so its time is that of reading them. oneDNN's blocked form of a weight
is read at nearly twice the speed of plain rows (SmolLM2's blocks in bfloat16, one thread, 1 to 4 rows: 8.5 ms against 16.8).
PyTorch builds it for `torch.compile`; it is reached here through the same two operators. It is a second copy beside the model's
own. Where oneDNN has no such form (another device or dtype) the layers are joined in plain rows, of which their own weights are
views from then on, or one alone is used as it is: nothing is held twice.
No weight is rounded.
O outputs of all layers, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# Rows the form is chosen for. It serves any number; in float32, forms chosen for fewer than four rows sum in another order for
# one row than for several, and then a near tie may fall differently in plain and in speculative decoding.
ROWS = 4


# torch.compile would make oneDNN's weights constants of each graph, a copy for each; an operator of our own is opaque to it.
_LIBRARY = torch.library.Library("draftsmith", "FRAGMENT")
_LIBRARY.define("packed_linear(Tensor input, Tensor weight, Tensor? bias, int outputs) -> Tensor")


class PackedLinear:
    """Some linear layers with the same input as one function; their outputs are concatenated, `[..., O]`.

    Args:
        layers: plain linear layers; their weights must not change afterwards.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        weights = [layer.weight.detach() for layer in layers]
        biases = [layer.bias for layer in layers]
        self.weight_OI = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.bias_O = _joined(biases, [len(weight) for weight in weights], weights[0])
        self.num_outputs = len(self.weight_OI)
        self.is_packed = can_pack(self.weight_OI)
        if self.is_packed:
            self.weight_OI = torch.ops.mkldnn._reorder_linear_weight(self.weight_OI.contiguous(), ROWS)
        elif len(weights) > 1:
            for layer, rows in zip(layers, self.weight_OI.split([len(weight) for weight in weights]), strict=True):
                layer.weight.data = rows

    def __call__(self, input_: Tensor) -> Tensor:
        if self.is_packed and torch.compiler.is_compiling():
            output: Tensor = torch.ops.draftsmith.packed_linear(input_, self.weight_OI, self.bias_O, self.num_outputs)
            return output
        if self.is_packed:
            return _multiply(input_, self.weight_OI, self.bias_O, self.num_outputs)
        return nn.functional.linear(input_, self.weight_OI, self.bias_O)


def can_pack(weight: Tensor) -> bool:
    """Say whether oneDNN has a blocked form for weights on this device and of this dtype."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _multiply(input_: Tensor, weight_OI: Tensor, bias_O: Tensor | None, outputs: int) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(input_, weight_OI, bias_O, "none", [], "")
    return output


def _shape_only(input_: Tensor, weight_OI: Tensor, bias_O: Tensor | None, outputs: int) -> Tensor:
    return input_.new_empty((*input_.shape[:-1], outputs))


_LIBRARY.impl("packed_linear", _multiply, "CPU")
_LIBRARY.impl("packed_linear", _multiply, "MkldnnCPU")
torch.library.register_fake("draftsmith::packed_linear", _shape_only, lib=_LIBRARY)


def _joined(biases: Sequence[Tensor | None], sizes: Sequence[int], like: Tensor) -> Tensor | None:
    """Return the biases concatenated, 0 for layers without; None where no layer has one."""
    if all(bias is None for bias in biases):
        return None
    parts = [like.new_zeros(size) if bias is None else bias.detach() for bias, size in zip(biases, sizes, strict=True)]
    return torch.cat(parts)

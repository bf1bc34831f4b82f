"""Bytes read and floating-point operations done by the matrix products of decoding or training, on any machine.

Counted where torch dispatches operations, so that it holds for every family of drafts. Bytes are those of all operands:
weights, keys and values, and activations. Norms, activation functions and the softmax over the vocabulary are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


def _product(args: Sequence[Any]) -> int:
    """Count `[..., m, k] @ [..., k, n]`."""
    return int(2 * args[0].numel() * args[1].shape[-1])


def _linear(args: Sequence[Any]) -> int:
    """Count `[..., k] @ [n, k]` transposed; a packed weight knows its shape."""
    return int(2 * args[0].numel() * args[1].shape[0])


def _attention(args: Sequence[Any]) -> int:
    """Count queries by keys, and weights by values."""
    return int(4 * args[0].numel() * args[1].shape[-2])


def _attention_backward(args: Sequence[Any]) -> int:
    """Count the gradients of both products, not the scores that a kernel computes anew to save memory."""
    return 2 * _attention(args[1:])


ATTENTION = (
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)
# Operation -> (its floating-point operations, the places of its operands)
PRODUCTS: Mapping[str, tuple[Callable[[Sequence[Any]], int], tuple[int, ...]]] = {
    "aten::mm": (_product, (0, 1)),
    "aten::bmm": (_product, (0, 1)),
    "aten::matmul": (_product, (0, 1)),
    "aten::addmm": (lambda args: _product(args[1:]), (1, 2)),
    "aten::baddbmm": (lambda args: _product(args[1:]), (1, 2)),
    "aten::_grouped_mm": (_product, (0,)),  # experts, of which a token's reads only some
    "aten::linear": (_linear, (0, 1)),
    "mkldnn::_linear_pointwise": (_linear, (0, 1)),
    **dict.fromkeys(ATTENTION, (_attention, (0, 1, 2))),
    **dict.fromkeys((f"{name}_backward" for name in ATTENTION), (_attention_backward, (0, 1, 2, 3))),
}


class WorkCounter(TorchDispatchMode):
    """Counts while it is entered: `bytes` and `flops`."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (product := PRODUCTS.get(func._schema.name)) is not None:
            count, operands = product
            self.flops += count(args)
            self.bytes += sum(args[place].numel() * args[place].element_size() for place in operands)
        return func(*args, **(kwargs or {}))

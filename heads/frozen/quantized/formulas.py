"""What the numbers of a packed matrix stand for, scheme by scheme: tensors as they are stored to one of float32.

By the definitions of compressed-tensors, GPTQModel, AutoAWQ and bitsandbytes; gpt-oss's MXFP4 is read by transformers' own
function. R rows (outputs) and C columns (inputs) of a matrix, G groups of columns with a scale each, N numbers in a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in an int32 the next of eight rows is


def scaled(numbers: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, sizes: Sequence[int]) -> Tensor:
    """Return (numbers - zero point) * scale.

    Args:
        numbers: `[R, C]`, or `[E, R, C]` of E experts.
        scale: float, or uint8, an exponent of 2 plus 127; `[]`, `[1]`, `[R]`, `[R, 1]`, or one for each block.
        zero_point: as the scale; None: 0.
        sizes: how many numbers a block spans in each dimension; 1 where there is a scale for each or one for all.
    """
    factor = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
    if zero_point is None:
        return numbers.float() * _spread(factor, numbers.shape, sizes)
    return (numbers.float() - _spread(zero_point.float(), numbers.shape, sizes)) * _spread(factor, numbers.shape, sizes)


def from_pack_quantized(
    packed: Tensor, shape: Tensor, scale: Tensor, zero_point: Tensor | None = None, g_idx: Tensor | None = None, *, bits: int
) -> Tensor:
    """Return a matrix of compressed-tensors' pack-quantized form, of numbers from -2^(bits-1) on.

    Args:
        packed: int32 `[R, C * bits / 32]`.
        shape: R and C.
        scale: `[R, G]`; G is 1 where a row has one scale.
        zero_point: int32 `[R * bits / 32, G]`, or int8 `[R, G]`; None: 0.
        g_idx: the group of each column, `[C]`; None, or negative ones: columns lie in the order of their groups.
    """
    (rows, columns), lowest = shape.tolist(), -(2 ** (bits - 1))
    group_C = _groups(columns, scale.shape[1], g_idx)
    numbers_RC = unpacked(packed, bits)[:, :columns] + lowest
    if zero_point is None:
        return numbers_RC * scale.float()[:, group_C]
    zeros_RG = unpacked(zero_point.T, bits)[:, :rows].T + lowest if zero_point.dtype == torch.int32 else zero_point.int()
    return (numbers_RC - zeros_RG[:, group_C]) * scale.float()[:, group_C]


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, *, bits: int, zero_offset: int
) -> Tensor:
    """Return a matrix of GPTQ's.

    Args:
        qweight: int32 `[C * bits / 32, R]`.
        qzeros: int32 `[G, R * bits / 32]`.
        scales: `[G, R]`.
        g_idx: as of `from_pack_quantized`.
        zero_offset: of a zero point less the number that is stored.
    """
    numbers_RC = unpacked(qweight.T, bits)
    zeros_GR = unpacked(qzeros, bits) + zero_offset
    group_C = _groups(numbers_RC.shape[1], len(scales), g_idx)
    return (numbers_RC - zeros_GR.T[:, group_C]) * scales.float().T[:, group_C]


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """Return a matrix of AWQ's gemm form, of 4 bits.

    Args:
        qweight: int32 `[C, R / 8]`.
        qzeros: int32 `[G, R / 8]`.
        scales: `[G, R]`.
    """
    numbers_CR, zeros_GR = (unpacked(words, 4).unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1) for words in (qweight, qzeros))
    group_C = _groups(len(numbers_CR), len(scales), None)
    return ((numbers_CR - zeros_GR[group_C]) * scales.float()[group_C]).T.contiguous()


def from_bitsandbytes_4bit(
    packed: Tensor,
    absmax: Tensor,
    quant_map: Tensor,
    nested_absmax: Tensor | None = None,
    nested_quant_map: Tensor | None = None,
    state: Tensor | None = None,
    *,
    shape: tuple[int, ...],
    blocksize: int,
    nested_blocksize: int = 1,
    nested_offset: float = 0.0,
) -> Tensor:
    """Return a matrix of bitsandbytes' NF4 or FP4, row after row, the first number of a byte in its high bits.

    Args:
        packed: its bytes.
        absmax: the largest magnitude of each block; with `nested_absmax` entries of `nested_quant_map`, less the offset.
        quant_map: the value of each number, `[16]`.
        state: the settings, which are the keywords here.
    """
    bytes_N = packed.contiguous().view(torch.uint8).flatten()
    numbers_N = torch.stack((bytes_N >> 4, bytes_N & 15), 1).flatten()[: math.prod(shape)]
    if nested_absmax is not None and nested_quant_map is not None:
        factors = nested_absmax.repeat_interleave(nested_blocksize)[: len(absmax)]
        absmax = nested_quant_map[absmax.int()] * factors + nested_offset
    return (quant_map[numbers_N.int()] * absmax.repeat_interleave(blocksize)[: len(numbers_N)]).reshape(shape)


def from_bitsandbytes_8bit(numbers: Tensor, largest: Tensor, layout: Tensor | None = None) -> Tensor:
    """Return a matrix of LLM.int8: `[R, C]` numbers, and the largest magnitude of each row, `[R]`."""
    return numbers.float() * (largest.float() / 127)[:, None]


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned numbers in int32 words, from their lowest bits on, along the last dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (2**bits - 1)).flatten(-2)


def _groups(columns: int, num_groups: int, g_idx: Tensor | None) -> Tensor:
    """Return the group of each column."""
    if g_idx is not None and g_idx.min() >= 0:
        return g_idx.long()
    return torch.arange(columns) // math.ceil(columns / num_groups)


def _spread(scale: Tensor, shape: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return scales so that they multiply numbers of this shape."""
    scale = scale.reshape(*scale.shape, *[1] * (len(shape) - scale.ndim))
    for dim, size in enumerate(sizes):
        if size > 1:
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return scale

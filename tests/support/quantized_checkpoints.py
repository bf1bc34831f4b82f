"""Tiny quantised checkpoints, written number by number by the definitions of their formats, and the weights that they mean."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]  # tensors by what follows the module's name; the weights that they stand for, float64
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NF4 = [-1.0, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0]


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint is quantised: its `quantization_config`, the packing of a matrix, and which matrices are packed."""

    settings: dict
    pack: Callable[[Tensor], Packed]
    which: tuple[str, ...] = ("_proj",)
    left_out: tuple[str, ...] = field(default=("layers.1.self_attn.o_proj",))


def quantise(folder: Path, scheme: Scheme) -> dict[str, Tensor]:
    """Quantise a model folder in place; return the weights it then stands for, float64."""
    stored, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if not any(part in name for part in scheme.which) or any(part in name for part in scheme.left_out) or weight.ndim < 2:
            stored[name], meant[name] = weight, weight.double()
            continue
        tensors, meant[name] = scheme.pack(weight)
        stored |= {stem + ending: tensor.contiguous() for ending, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": scheme.settings}))
    return meant


def fp8_blocks(scale_name: str, block: int, *, as_exponents: bool = False) -> Callable[[Tensor], Packed]:
    """E4M3 with a scale for every square block; blocks at the edges are cut off."""

    def pack(weight: Tensor) -> Packed:
        rows, columns = weight.shape[-2:]
        scales = torch.zeros(*weight.shape[:-2], -(-rows // block), -(-columns // block))
        numbers, meant = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(weight.shape, dtype=torch.float64)
        for place in np.ndindex(scales.shape):
            spot = (
                *place[:-2],
                slice(place[-2] * block, place[-2] * block + block),
                slice(place[-1] * block, place[-1] * block + block),
            )
            scale = weight[spot].abs().max() / 448
            scale = scale.log2().ceil().exp2() if as_exponents else scale
            scales[place] = scale
            numbers[spot] = (weight[spot] / scale).to(torch.float8_e4m3fn)
            meant[spot] = numbers[spot].double() * scale.double()
        stored = (scales.log2() + 127).to(torch.uint8) if as_exponents else scales
        return {".weight" if weight.ndim == 2 else "": numbers, scale_name: stored}, meant

    return pack


def fp8_whole(scale_name: str, *, by_row: bool, scale_dtype: torch.dtype = torch.float32) -> Callable[[Tensor], Packed]:
    """E4M3 with a scale for each row, or one."""

    def pack(weight: Tensor) -> Packed:
        largest = weight.abs().amax(1, keepdim=True) if by_row else weight.abs().max()
        scale = (largest / 448).to(scale_dtype)
        numbers = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        meant = torch.zeros(weight.shape, dtype=torch.float64)
        for row, column in np.ndindex(*weight.shape):
            meant[row, column] = float(numbers[row, column]) * float(scale[row, 0] if by_row else scale)
        return {".weight": numbers, scale_name: scale, ".input_scale": torch.ones(1)}, meant

    return pack


def int8_rows(weight: Tensor) -> Packed:
    """int8 with a scale and a zero point for each row."""
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale = (high - low) / 255
    zero = (-128 - low / scale).round()
    numbers = (weight / scale + zero).round().clamp(-128, 127).to(torch.int8)
    meant = (numbers.double() - zero.double()) * scale.double()
    return {".weight": numbers, ".weight_scale": scale, ".weight_zero_point": zero.to(torch.int8)}, meant


def _by_groups(weight: Tensor, bits: int, group_of: list[int], dtype: torch.dtype) -> tuple[list, list, Tensor, Tensor]:
    """Return unsigned numbers `[R][C]`, zero points `[R][G]`, scales `[R, G]` and what they mean."""
    rows, columns, top = *weight.shape, 2**bits - 1
    num_groups = max(group_of) + 1
    scales, zeros = torch.zeros(rows, num_groups, dtype=dtype), [[0] * num_groups for _ in range(rows)]
    numbers, meant = [[0] * columns for _ in range(rows)], torch.zeros(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for group in range(num_groups):
            own = [column for column in range(columns) if group_of[column] == group]
            values = [float(weight[row, column]) for column in own]
            low, high = min(*values, 0.0), max(*values, 0.0)
            scales[row, group] = (high - low) / top
            scale = float(scales[row, group])
            zeros[row][group] = min(max(round(-low / scale), 1), top)
            for column, value in zip(own, values, strict=True):
                numbers[row][column] = min(max(round(value / scale) + zeros[row][group], 0), top)
                meant[row, column] = (numbers[row][column] - zeros[row][group]) * scale
    return numbers, zeros, scales, meant


def _words(numbers: list[int], bits: int, order: tuple[int, ...] | None = None) -> list[int]:
    """Pack numbers into int32 words; `order`: which number of a word comes next, from the lowest bits on."""
    count = 32 // bits
    padded = numbers + [0] * (-len(numbers) % count)
    words = []
    for start in range(0, len(padded), count):
        word = sum(padded[start + (order[place] if order else place)] << (bits * place) for place in range(count))
        words.append(struct.unpack("<i", struct.pack("<I", word))[0])
    return words


def _matrix(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def _turned(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def gptq(bits: int, *, group: int = 16, shuffled: bool = False, v2: bool = False) -> Callable[[Tensor], Packed]:
    """Numbers packed along columns, zero points (less 1 in the first version) along rows, both transposed."""

    def pack(weight: Tensor) -> Packed:
        columns = weight.shape[1]
        group_of = [column // group for column in range(columns)]
        if shuffled:
            group_of = [group_of[(7 * column) % columns] for column in range(columns)]
        numbers, zeros, scales, meant = _by_groups(weight, bits, group_of, torch.float16)
        return {
            ".qweight": _matrix([_words(row, bits) for row in numbers]).T,
            ".qzeros": _matrix([_words([zero - (not v2) for zero in row], bits) for row in _turned(zeros)]),
            ".scales": scales.T,
            ".g_idx": torch.tensor(group_of, dtype=torch.int32),
        }, meant

    return pack


def awq(weight: Tensor) -> Packed:
    """4 bits along rows, every eight of them interleaved: 0 2 4 6 1 3 5 7."""
    group_of = [column // 16 for column in range(weight.shape[1])]
    numbers, zeros, scales, meant = _by_groups(weight, 4, group_of, torch.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        ".qweight": _matrix([_words(column, 4, order) for column in _turned(numbers)]),
        ".qzeros": _matrix([_words(column, 4, order) for column in _turned(zeros)]),
        ".scales": scales.T,
    }, meant


def pack_quantized(*, bits: int = 4, zero_points: bool, shuffled: bool = False, group: int = 16) -> Callable[[Tensor], Packed]:
    """compressed-tensors' int32 form: numbers along columns and zero points along rows, each stored plus 2^(bits-1)."""

    def pack(weight: Tensor) -> Packed:
        rows, columns = weight.shape
        group_of = [column // group for column in range(columns)]
        if shuffled:
            group_of = [group_of[(5 * column) % columns] for column in range(columns)]
        numbers, zeros, scales, meant = _by_groups(weight, bits, group_of, torch.bfloat16)
        tensors = {".weight_scale": scales, ".weight_shape": torch.tensor([rows, columns])}
        if shuffled:
            tensors[".weight_g_idx"] = torch.tensor(group_of, dtype=torch.int32)
        if zero_points:
            tensors[".weight_zero_point"] = _matrix([_words(column, bits) for column in _turned(zeros)]).T
        else:
            half = 2 ** (bits - 1)
            for row, column in np.ndindex(rows, columns):
                meant[row, column] = (numbers[row][column] - half) * float(scales[row, group_of[column]])
        return tensors | {".weight_packed": _matrix([_words(row, bits) for row in numbers])}, meant

    return pack


def mxfp4(weight: Tensor) -> Packed:
    """gpt-oss: E2M1 numbers with a power of two for every 32 inputs; experts are stored outputs first, and run inputs first."""
    experts, inputs, outputs = weight.shape
    blocks = torch.zeros(experts, outputs, inputs // 32, 16, dtype=torch.uint8)
    scales = torch.zeros(experts, outputs, inputs // 32, dtype=torch.uint8)
    meant = torch.zeros(weight.shape, dtype=torch.float64)
    for expert, output, group in np.ndindex(*scales.shape):
        values = weight[expert, group * 32 : group * 32 + 32, output].double()
        exponent = int(np.floor(np.log2(float(values.abs().max()) / 6))) + 1
        scales[expert, output, group] = exponent + 127
        codes = []
        for place, value in enumerate(values.tolist()):
            code = min(range(8), key=lambda code: abs(E2M1[code] - abs(value) / 2.0**exponent))
            codes.append(code + 8 * (value < 0))
            meant[expert, group * 32 + place, output] = (-1) ** (value < 0) * E2M1[code] * 2.0**exponent
        blocks[expert, output, group] = torch.tensor(
            [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
        )
    return {"_blocks": blocks, "_scales": scales}, meant


def bitsandbytes_nf4(weight: Tensor) -> Packed:
    """A table's entry by 4 bits, high bits first, times the largest magnitude of 64, itself an entry of a table of 256."""
    values, block, nested_block = weight.flatten().numpy(), 64, 4
    largest = np.array([np.abs(values[start : start + block]).max() for start in range(0, len(values), block)], np.float32)
    offset = float(largest.mean())
    table = np.linspace(-1, 1, 256, dtype=np.float32)
    nested = np.array(
        [np.abs(largest[start : start + nested_block] - offset).max() for start in range(0, len(largest), nested_block)],
        np.float32,
    )
    indices, codes, meant = [], [], np.zeros(len(values), np.float32)
    for number, value in enumerate(values):
        place = number // block
        if number % block == 0:
            share = (largest[place] - offset) / max(nested[place // nested_block], 1e-9)
            indices.append(int(np.abs(table - share).argmin()))
        factor = table[indices[place]] * nested[place // nested_block] + np.float32(offset)
        codes.append(min(range(16), key=lambda code: abs(NF4[code] * factor - value)))
        meant[number] = np.float32(NF4[codes[-1]]) * factor
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
    state |= {"nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": offset}
    packed = [high << 4 | low for high, low in zip(codes[::2], codes[1::2], strict=True)]
    return {
        ".weight": torch.tensor(packed, dtype=torch.uint8)[:, None],
        ".weight.absmax": torch.tensor(indices, dtype=torch.uint8),
        ".weight.quant_map": torch.tensor(NF4),
        ".weight.nested_absmax": torch.from_numpy(nested),
        ".weight.nested_quant_map": torch.from_numpy(table),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }, torch.from_numpy(meant).double().reshape(weight.shape)


def bitsandbytes_int8(weight: Tensor) -> Packed:
    """int8 of a row's largest magnitude / 127."""
    largest = weight.abs().amax(1)
    numbers = (weight * 127 / largest[:, None]).round().to(torch.int8)
    meant = numbers.double() * (largest.double() / 127)[:, None]
    return {".weight": numbers, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}, meant

"""Tiny quantised checkpoints, written number by number by the definitions of their formats, and the weights that they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]  # tensors by what follows the module's name; the weights that they stand for, float64
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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


def fp8(
    scale_name: str, rows: int | None, columns: int | None, *, as_exponents: bool = False, dtype: torch.dtype = torch.float32
) -> Callable[[Tensor], Packed]:
    """E4M3 with a scale for every block of so many rows and columns (None: all); blocks at the edges are cut off."""

    def pack(weight: Tensor) -> Packed:
        height, width = rows or weight.shape[-2], columns or weight.shape[-1]
        scales = torch.zeros(*weight.shape[:-2], -(-weight.shape[-2] // height), -(-weight.shape[-1] // width), dtype=dtype)
        numbers, meant = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(weight.shape, dtype=torch.float64)
        for place in np.ndindex(scales.shape):
            *experts, row, column = place
            spot = (*experts, slice(row * height, row * height + height), slice(column * width, column * width + width))
            scale = weight[spot].abs().max() / 448
            scales[place] = scale.log2().ceil().exp2() if as_exponents else scale
            numbers[spot] = (weight[spot] / scales[place].float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            meant[spot] = numbers[spot].double() * scales[place].double()
        stored = (scales.log2() + 127).to(torch.uint8) if as_exponents else scales
        stored = stored.reshape(()) if rows is columns is None else stored
        return {".weight" if weight.ndim == 2 else "": numbers, scale_name: stored, ".input_scale": torch.ones(1)}, meant

    return pack


def mxfp4(weight: Tensor) -> Packed:
    """gpt-oss: E2M1 numbers with a power of two for every 32 inputs; experts are stored outputs first, and run inputs first."""
    experts, inputs, outputs = weight.shape
    codes = torch.randint(16, (experts, outputs, inputs))
    exponents = torch.randint(-6, -2, (experts, outputs, inputs // 32))
    meant = torch.tensor([*E2M1, *(-number for number in E2M1)]).double()[codes] * 2.0 ** exponents.repeat_interleave(32, -1)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(experts, outputs, inputs // 32, 16)
    return {"_blocks": blocks.to(torch.uint8), "_scales": (exponents + 127).to(torch.uint8)}, meant.transpose(1, 2)

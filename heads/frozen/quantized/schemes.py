"""Which matrices of a quantised checkpoint are packed, of which stored tensors, and which schemes are known.

A packed matrix is known by the tensors beside it, so what a scheme leaves as it was (norms, router, output head) is read as it
is stored. transformers' own reading of FP8 is not used: it takes the size of a block from the number of scales, which fails
where a block at the edge is cut off (DeepSeek-V3's `kv_a_proj_with_mqa` has 576 rows in blocks of 128).
R rows (outputs) and C columns (inputs) of a matrix, G groups of columns with a scale each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from configs.runtime.errors import InputError
from heads.frozen.checkpoint_files import LazyTensor, Weights, listed
from heads.frozen.quantized.formulas import (
    from_awq,
    from_bitsandbytes_4bit,
    from_bitsandbytes_8bit,
    from_gptq,
    from_pack_quantized,
    scaled,
)

Settings = dict[str, Any]  # a config's `quantization_config`

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
WIDTHS = (2, 4, 8)  # bits of a number that are read from int32
FORMATS = ("dense", "naive-quantized", "int-quantized", "float-quantized", "pack-quantized", "mixed-precision")


@dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    """A matrix that a checkpoint holds in several tensors.

    Args:
        name, shape: of the floating matrix.
        parts: the names of its tensors, by the argument of `unpack` that each is.
        unpack: makes it of them, in `dtype`.
    """

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    unpack: Callable[..., Tensor]
    dtype: torch.dtype = torch.float32

    def read_from(self, weights: Weights) -> LazyTensor:
        """Return it as a tensor that is unpacked when it is read."""

        def load() -> Tensor:
            return self.unpack(**{role: weights[name].load() for role, name in self.parts.items()})

        return LazyTensor(shape=self.shape, dtype=self.dtype, load=load)


def packed_matrices(weights: Weights, settings: Settings) -> list[PackedMatrix]:
    """Return the packed matrices of a checkpoint.

    Raises:
        InputError: the scheme is not known, or the tensors do not fit it.
    """
    method = settings["quant_method"]
    unknown = _unknown_form(method, settings) if method in FINDERS else ""
    if unknown is not None:
        raise InputError(
            f"its weights are quantised by {method}{unknown}, which cannot be dequantised; known are {', '.join(FINDERS)}. "
            "Give an unquantised copy of the model, whose drafts are then known to be for that copy only"
        )
    return [matrix for finder in FINDERS[method] for matrix in finder(weights, settings)]


def _unknown_form(method: str, settings: Settings) -> str | None:
    """Return in words which form of a known method is not read; None: it is."""
    if method == "compressed-tensors":
        sparsity = (settings.get("sparsity_config") or {}).get("format") or "dense"
        forms = {part.get("format") or "dense" for part in (settings, *_groups(settings))} - set(FORMATS)
        forms |= {sparsity} - {"dense"}
        forms |= {"transforms"} if (settings.get("transform_config") or {}).get("config_groups") else set()
        return f" in the form {', '.join(sorted(forms))}" if forms else None
    form = str(settings.get("checkpoint_format") or settings.get("version") or settings.get("quant_algo") or "").lower()
    known = {"gptq": ("", "gptq", "gptq_v2"), "awq": ("", "gemm"), "modelopt": ("fp8",)}.get(method)
    return None if known is None or form in known else f" in the form {form or 'that its config does not name'}"


def _groups(settings: Settings) -> list[Settings]:
    """Return the groups of modules of compressed-tensors, each with a form of its own."""
    return [group for group in (settings.get("config_groups") or {}).values() if isinstance(group, dict)]


def _scaled_matrices(weights: Weights, settings: Settings) -> Iterator[PackedMatrix]:
    """Find matrices of small numbers with scales beside them; experts may be stacked in one tensor."""
    known = [*(settings.get("weight_block_size") or ())]
    for group in _groups(settings):
        options = group.get("weights") or {}
        known += [*(options.get("block_structure") or ()), options.get("group_size") or 0]
    # int8 in an FP8 checkpoint is a pair of FP4 numbers, which are not read.
    kinds = (*FLOAT8, torch.int8) if settings["quant_method"] == "compressed-tensors" else FLOAT8
    for name, stored in weights.items():
        scale = next((name + ending for ending in ("_scale_inv", "_scale") if name + ending in weights), None)
        if scale is not None and stored.dtype in kinds:
            _check_fits(name, weights, f"{name}_g_idx" not in weights)  # activation order is known of int32 only
            sizes = _block_sizes(name, stored.shape, weights[scale].shape, known)
            parts = {"numbers": name, "scale": scale, "zero_point": f"{name}_zero_point"}
            yield PackedMatrix(name=name, shape=stored.shape, parts=_there(parts, weights), unpack=partial(scaled, sizes=sizes))


def _int32_matrices(weights: Weights, settings: Settings) -> Iterator[PackedMatrix]:
    """Find the matrices of compressed-tensors' pack-quantized form."""
    for stem in _stems("_packed", weights, "_scale", "_shape"):
        stored = weights[f"{stem}_packed"]
        rows, columns = (int(size) for size in weights[f"{stem}_shape"].load())
        bits = next((bits for bits in WIDTHS if stored.shape == (rows, math.ceil(columns * bits / 32))), 0)
        _check_fits(f"{stem}_packed", weights, bits > 0)
        parts = {"packed": f"{stem}_packed", "shape": f"{stem}_shape"}
        parts |= {role: f"{stem}_{role}" for role in ("scale", "zero_point", "g_idx")}
        yield PackedMatrix(
            name=stem,
            shape=(rows, columns),
            parts=_there(parts, weights),
            unpack=partial(from_pack_quantized, bits=bits),
        )


def _gptq_matrices(weights: Weights, settings: Settings) -> Iterator[PackedMatrix]:
    offset = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    for stem in _stems(".qweight", weights, ".qzeros", ".scales"):
        qweight, qzeros, (num_groups, rows) = (weights[f"{stem}.{part}"].shape for part in ("qweight", "qzeros", "scales"))
        bits = next((bits for bits in WIDTHS if qzeros == (num_groups, rows * bits // 32)), 0)
        _check_fits(f"{stem}.qzeros", weights, bits > 0)
        _check_fits(f"{stem}.qweight", weights, qweight[1:] == (rows,))
        parts = {part: f"{stem}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
        yield PackedMatrix(
            name=f"{stem}.weight",
            shape=(rows, qweight[0] * 32 // bits),
            parts=_there(parts, weights),
            unpack=partial(from_gptq, bits=bits, zero_offset=offset),
        )


def _awq_matrices(weights: Weights, settings: Settings) -> Iterator[PackedMatrix]:
    if scaled_activations := [name for name in weights if name.endswith(".act.scales")]:
        raise InputError(f"its activations are scaled too ({listed(scaled_activations)}), which is not known")
    for stem in _stems(".qweight", weights, ".qzeros", ".scales"):
        qweight, qzeros, (num_groups, rows) = (weights[f"{stem}.{part}"].shape for part in ("qweight", "qzeros", "scales"))
        _check_fits(f"{stem}.qweight", weights, qweight[1:] == (rows // 8,))
        _check_fits(f"{stem}.qzeros", weights, qzeros == (num_groups, rows // 8))
        parts = {part: f"{stem}.{part}" for part in ("qweight", "qzeros", "scales")}
        yield PackedMatrix(name=f"{stem}.weight", shape=(rows, qweight[0]), parts=parts, unpack=from_awq)


def _mxfp4_matrices(weights: Weights, settings: Settings) -> Iterator[PackedMatrix]:
    for name in _stems("_proj_blocks", weights, "_proj_scales"):
        blocks, scales = (weights[f"{name}_proj_{part}"].shape for part in ("blocks", "scales"))
        _check_fits(f"{name}_proj_blocks", weights, len(blocks) == 4 and scales == blocks[:-1])
        yield PackedMatrix(
            name=f"{name}_proj",
            shape=(blocks[0], blocks[2] * blocks[3] * 2, blocks[1]),  # transposed, as gpt-oss multiplies
            parts={part: f"{name}_proj_{part}" for part in ("blocks", "scales")},
            unpack=partial(convert_moe_packed_tensors, dtype=torch.bfloat16),
            dtype=torch.bfloat16,  # exact: two significant bits and a power of two
        )


def _bitsandbytes_matrices(weights: Weights, settings: Settings) -> Iterator[PackedMatrix]:
    for table in ("nf4", "fp4"):
        for name in _stems(f".quant_state.bitsandbytes__{table}", weights, "", ".absmax", ".quant_map"):
            yield _four_bit_matrix(name, f"{name}.quant_state.bitsandbytes__{table}", weights)
    for stem in _stems(".SCB", weights, ".weight"):
        name, layout = f"{stem}.weight", f"{stem}.weight_format"
        _check_fits(name, weights, layout not in weights or not weights[layout].load().any())  # 0: row after row
        parts = {"numbers": name, "largest": f"{stem}.SCB", "layout": layout}
        yield PackedMatrix(name=name, shape=weights[name].shape, parts=_there(parts, weights), unpack=from_bitsandbytes_8bit)


def _four_bit_matrix(name: str, state: str, weights: Weights) -> PackedMatrix:
    said = json.loads(bytes(weights[state].load().tolist()))
    shape, stored = tuple(said["shape"]), weights[name]
    num_bytes = math.prod(stored.shape) * stored.dtype.itemsize  # of any dtype, in which bitsandbytes was told to store them
    _check_fits(name, weights, math.ceil(math.prod(shape) / 2) == num_bytes)
    parts = {role: f"{name}.{role}" for role in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")}
    sizes = {key: said[key] for key in ("blocksize", "nested_blocksize", "nested_offset") if key in said}
    return PackedMatrix(
        name=name,
        shape=shape,
        parts=_there({"packed": name, "state": state, **parts}, weights),
        unpack=partial(from_bitsandbytes_4bit, shape=shape, **sizes),
    )


FINDERS: dict[str, tuple[Callable[[Weights, Settings], Iterator[PackedMatrix]], ...]] = {
    "fp8": (_scaled_matrices,),
    "fbgemm_fp8": (_scaled_matrices,),
    "modelopt": (_scaled_matrices,),
    "compressed-tensors": (_scaled_matrices, _int32_matrices),
    "mxfp4": (_mxfp4_matrices,),
    "gptq": (_gptq_matrices,),
    "awq": (_awq_matrices,),
    "bitsandbytes": (_bitsandbytes_matrices,),
}


def _stems(ending: str, weights: Weights, *others: str) -> Iterator[str]:
    """Yield what goes before an ending in names of tensors; beside each there must be tensors with the other endings."""
    for name in weights:
        if name.endswith(ending):
            stem = name.removesuffix(ending)
            missing = [stem + other for other in others if stem + other not in weights]
            if missing:
                raise InputError(f"it holds {name} without {listed(missing)}")
            yield stem


def _there(parts: Mapping[str, str], weights: Weights) -> dict[str, str]:
    return {role: name for role, name in parts.items() if name in weights}


def _block_sizes(name: str, shape: Sequence[int], scales: Sequence[int], known: Sequence[int]) -> tuple[int, ...]:
    """Return how many numbers a scale spans by dimension: a size of the config, or even parts; 1: one number, or all."""
    sizes = []
    for length, count in zip(shape, (*scales, *[1] * (len(shape) - len(scales))), strict=True):
        fitting = [size for size in known if size > 0 and math.ceil(length / size) == count]
        even = length // count if count > 0 and length % count == 0 else 0
        sizes.append(1 if count in (1, length) else [*fitting, even][0])
    if 0 in sizes:
        raise InputError(f"its {name} {list(shape)} has scales {list(scales)}, which are no blocks of {known} numbers")
    return tuple(sizes)


def _check_fits(name: str, weights: Weights, fits: bool) -> None:
    if not fits:
        raise InputError(
            f"its {name}, {weights[name].dtype} {list(weights[name].shape)}, does not fit the tensors beside it; numbers in "
            f"int32 are read of {', '.join(map(str, WIDTHS))} bits"
        )

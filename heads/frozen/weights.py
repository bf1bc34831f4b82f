"""The weights of a model's folder: its files, their tensors by name, and its matrices as floating numbers in the model's class.

Tensors of safetensors files are maps of the file: they take memory when they are used.
FP8 and MXFP4 matrices are unpacked, so that every part of the project finds ordinary ones. transformers' own reading of FP8
takes the size of a block from the number of scales, which fails where a block at the edge is cut off (DeepSeek-V3's
`kv_a_proj_with_mqa` has 576 rows in blocks of 128). Other schemes are refused.
R rows (outputs) and C columns (inputs) of a matrix, E experts.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import patch_environment
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import IS_POINTER, LFS_POINTER, TORCH_FILE, read_json

log = logging.getLogger("draftsmith")

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
GIB = 2**30
MAX_SHOWN = 12  # names repeated in an error message
# What transformers raises for a file that is missing, damaged, contradictory, or needs a package that is not installed.
UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, ImportError, AssertionError, SafetensorError, StrictDataclassError)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
PACKED = (*FLOAT8, torch.int8, torch.uint8, torch.int32)  # of numbers that mean nothing without the scales beside them
# Of activations and the cache, which stay in floating point here.
UNREAD = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "q_scale", "k_scale", "v_scale")

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
WITH_CODE = ("config.json", "tokenizer_config.json")  # may name Python files under `auto_map`

Weights = dict[str, Tensor]


def read_weights(folder: Path) -> Weights:
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        paths = sorted({folder / file for file in files_by_key(folder).values()})
        return {name: value for path in paths for name, value in read_tensors(path).items()}
    if (folder / TORCH_FILE).is_file():
        return _torch_file(folder / TORCH_FILE)
    raise InputError(f"{folder} holds none of {SINGLE_FILE}, {INDEX_FILE}, {TORCH_FILE}")


def read_tensors(path: Path) -> Weights:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(cause_of(path, error)) from error


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a safetensors file; one tensor under several names is written as often."""
    seen: set[int] = set()
    values = {}
    for name, value in weights.items():
        values[name] = value.clone(memory_format=torch.contiguous_format) if value.data_ptr() in seen else value.contiguous()
        seen.add(value.data_ptr())
    save_file(values, path, metadata={"format": "pt"})


def files_by_key(folder: Path) -> dict[str, str]:
    """Return the file of every tensor of a safetensors checkpoint."""
    if (folder / INDEX_FILE).is_file():
        files = indexed_files(folder)
        absent = {file for file in files.values() if Path(file).name != file or not (folder / file).is_file()}
        if absent:
            raise InputError(f"{folder / INDEX_FILE} names files that are not in the folder: {listed(absent)}")
        return files
    if not (folder / SINGLE_FILE).is_file():
        raise InputError(f"{folder} holds neither {INDEX_FILE} nor {SINGLE_FILE}, where a checkpoint's MTP weights would be")
    try:
        with safe_open(folder / SINGLE_FILE, "pt") as file:
            return dict.fromkeys(file.keys(), SINGLE_FILE)
    except (OSError, SafetensorError) as error:
        raise InputError(cause_of(folder / SINGLE_FILE, error)) from error


def indexed_files(folder: Path) -> dict[str, str]:
    """Return the file of every tensor that a checkpoint's index names, there or not."""
    index = read_json(folder / INDEX_FILE, "index of the checkpoint")
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise InputError(f"{folder / INDEX_FILE} has no weight_map")
    return {key: str(file) for key, file in index["weight_map"].items()}


def listed(keys: Collection[str]) -> str:
    """Return names for an error message, the first dozen and how many more there are."""
    names = sorted(keys)
    return ", ".join(names[:MAX_SHOWN]) + (f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else "")


def link_or_copy(path: str | Path, to: str | Path) -> None:
    """Link a file where the file system allows, copy it elsewhere; a symbolic link stands for what it leads to."""
    path = Path(path).resolve()
    try:
        os.link(path, to)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(path, to)


def _torch_file(path: Path) -> Weights:
    try:
        values: Weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} is no file of torch's with tensors only; what else such a file names is never run. Ask its author for "
            "safetensors"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise InputError(f"{path} holds something else than tensors by name")
    return values


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix that is unpacked when it is read, by `matrix[...]`, as a tensor of this shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    unpack: Callable[[], Tensor]

    def __getitem__(self, index: Any) -> Tensor:
        return self.unpack()[index]


FloatWeights = dict[str, Tensor | PackedMatrix]


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """Return what a checkpoint's config says of its quantisation, with a `quant_method`; None: nothing."""
    path = folder / "config.json"
    config = read_json(path, "config of the model") if path.is_file() else None
    text = config.get("text_config") if isinstance(config, dict) else None
    for part in (config, text):
        settings = (part.get("quantization_config") or part.get("compression_config")) if isinstance(part, dict) else None
        if isinstance(settings, dict):
            settings = settings | (settings.get("quantization_config") or {})
            return settings | {"quant_method": settings.get("quant_method") or "a method not named"}
    return None


def read_float_weights(folder: Path) -> FloatWeights:
    """Return a checkpoint's tensors by the names of the unquantised model; packed ones are unpacked when they are read."""
    settings, rest = quantization_of(folder), read_weights(folder)
    matrices: FloatWeights = {}
    for name, scale, matrix in () if settings is None else list(_packed_matrices(rest, settings, folder)):
        matrices[name.removesuffix("_blocks")] = matrix
        del rest[name], rest[scale]
    if settings is not None:
        rest = {name: stored for name, stored in rest.items() if not name.endswith(UNREAD)}
    left = [name for name, stored in rest.items() if stored.dtype in (FLOAT8 if settings is None else PACKED)]
    is_transformed = settings is not None and (settings.get("transform_config") or {}).get("config_groups")
    if left or is_transformed:
        says = "names no quantisation" if settings is None else f"names {settings['quant_method']}"
        raise InputError(
            f"{folder} cannot be read: {listed(left) or 'its weights'} cannot be dequantised, and its config.json {says}; only "
            "FP8 and MXFP4 are read. Give an unquantised or FP8 copy of the model: engines draft for this one by its drafts too"
        )
    return {**rest, **matrices}


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the auto class that loads and builds models of this config."""
    its_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    is_multimodal = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForMultimodalLM if is_multimodal and not its_own_code else AutoModelForCausalLM


def loader_of(folder: Path, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Callable[..., PreTrainedModel]:
    """Return what loads the model in a folder, by its own class, given further arguments of `from_pretrained`."""
    if (settings := quantization_of(folder)) is None:
        return partial(_load_as_stored, folder, dtype=dtype, trust_remote_code=trust_remote_code)
    weights = read_float_weights(folder)
    numbers = sum(math.prod(stored.shape) for stored in weights.values() if stored.dtype.is_floating_point)
    size, kind = numbers * dtype.itemsize / GIB, str(dtype).removeprefix("torch.")
    log.warning("%s (%s) is run dequantised to %s: about %.2f GiB of memory", folder, settings["quant_method"], kind, size)
    return partial(_load_dequantised, folder, weights, dtype=dtype, trust_remote_code=trust_remote_code)


def _load_as_stored(folder: Path, **arguments: Any) -> PreTrainedModel:
    trust_remote_code = arguments["trust_remote_code"]
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    load = auto_class(config).from_pretrained  # which returns a pair where the report is asked for
    model, report = load(folder, use_safetensors=True, local_files_only=True, output_loading_info=True, **arguments)
    read_float_weights(folder)  # refuses numbers without their scales, which transformers casts as they are
    return _whole(model, report, folder)


def _load_dequantised(folder: Path, weights: FloatWeights, *, trust_remote_code: bool, **arguments: Any) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    with torch.device("meta"):
        kind = type(auto_class(config).from_config(config, trust_remote_code=trust_remote_code))
    generation = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
    load: Any = kind.from_pretrained
    model, report = load(
        None, config=config, state_dict=weights, generation_config=generation, output_loading_info=True, **arguments
    )
    return _whole(model, report, folder)


def _whole(model: PreTrainedModel, report: dict[str, Any], folder: Path) -> PreTrainedModel:
    """Return a model of which every weight was found; transformers makes up the others."""
    missing = {name for name, _ in model.named_parameters()} & set(report["missing_keys"])
    if missing:
        raise InputError(f"{folder} cannot be read: it holds no values for {listed(missing)} of {type(model).__name__}")
    return model


def recast(model: PreTrainedModel, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """Return a model of the same weights as `from_pretrained(dtype=...)` gives it, on the CPU.

    `Module.to(dtype)` would also round what transformers keeps in float32 beside 16-bit weights: the frequencies of rotary
    embeddings, routing biases of experts. Tensors that already have the dtype may be shared with `model`.
    """
    load: Any = type(model).from_pretrained
    with patch_environment(ACCELERATE_USE_FSDP="false"):  # else transformers takes it for what is to be sharded
        recast: PreTrainedModel = load(
            None,
            config=model.config,
            state_dict=model.state_dict(),
            generation_config=model.generation_config,
            dtype=dtype,
            attn_implementation=attention or model.config._attn_implementation,
        )
    return recast


def _packed_matrices(weights: Weights, settings: dict[str, Any], folder: Path) -> Iterator[tuple[str, str, PackedMatrix]]:
    """Find FP8 and MXFP4 matrices: the names of their numbers and scales, and what they stand for."""
    known = [*(settings.get("weight_block_size") or ())]
    for group in (settings.get("config_groups") or {}).values():  # of compressed-tensors
        options = group.get("weights") or {}
        known += [*(options.get("block_structure") or ()), options.get("group_size") or 0]
    for name, stored in weights.items():
        scale = next((name + ending for ending in ("_scale_inv", "_scale") if name + ending in weights), None)
        of_blocks = name.removesuffix("blocks") + "scales"
        if scale is not None and stored.dtype in FLOAT8:
            sizes = _block_sizes(stored.shape, weights[scale].shape, known)
            if 0 in sizes:
                raise InputError(
                    f"{folder} cannot be read: {name} {list(stored.shape)} has scales {list(weights[scale].shape)}, which are "
                    f"no blocks of {known} numbers"
                )
            yield name, scale, PackedMatrix(stored.shape, torch.float32, partial(_scaled, stored, weights[scale], sizes))
        elif name.endswith("_proj_blocks") and of_blocks in weights:
            E, R, groups, num_bytes = stored.shape
            shape = (E, groups * num_bytes * 2, R)  # transposed, as gpt-oss multiplies
            # Exact in bfloat16: two significant bits and a power of two.
            unpack = partial(convert_moe_packed_tensors, stored, weights[of_blocks], dtype=torch.bfloat16)
            yield name, of_blocks, PackedMatrix(shape, torch.bfloat16, unpack)


def _block_sizes(shape: Sequence[int], scales: Sequence[int], known: Sequence[int]) -> list[int]:
    """Return how many numbers a scale spans by dimension: one of `known`, or even parts; 1: one number, or all; 0: unknown."""
    sizes = []
    for length, count in zip(shape, (*scales, *[1] * (len(shape) - len(scales))), strict=True):
        fitting = [size for size in known if size > 0 and math.ceil(length / size) == count]
        even = length // count if count > 0 and length % count == 0 else 0
        sizes.append(1 if count in (1, length) else [*fitting, even][0])
    return sizes


def _scaled(stored: Tensor, factor: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return FP8 numbers `[R, C]` or `[E, R, C]` times their scales; those in uint8 are exponents of 2, plus 127."""
    numbers = stored.float()
    factor = (factor.float() - 127).exp2() if factor.dtype == torch.uint8 else factor.float()
    factor = factor.reshape(*factor.shape, *[1] * (numbers.ndim - factor.ndim))
    for dim, size in enumerate(sizes):
        if size > 1:
            factor = factor.repeat_interleave(size, dim).narrow(dim, 0, numbers.shape[dim])
    return numbers * factor


# --- why a folder could not be loaded -------------------------------------------------------------------------------


def cause_of(path: Path, error: BaseException) -> str:
    """Return why `path`, a model's folder or a file of it, could not be loaded; the error's words where no file is at fault.

    Loaders name the folder, or nothing at all. Only looked for after a failure: a stand-in or a pickle beside what is loaded
    does no harm.
    """
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    for file in files:
        if file.is_file() and (fault := _fault_of(file)) is not None:
            return f"{file} {fault}"
    if "trust_remote_code" in str(error):
        named = [name for name in WITH_CODE if (path / name).is_file() and b"auto_map" in (path / name).read_bytes()]
        return (
            f"{path / (named or WITH_CODE)[0]} names code of its own (auto_map), which runs for a target alone: read it, then "
            "set target.trust_remote_code to true"
        )
    pickles = sorted(each for pattern in PICKLES for each in path.glob(pattern))
    if pickles and not any(path.glob("*.safetensors")):
        return (
            f"{pickles[0]} is a pickle, which may run code when it is read, and there are no safetensors: load the model in "
            "transformers where you trust it, save it by save_pretrained, and name that folder"
        )
    return first_line(error) if path.is_dir() else f"{path} cannot be read: {first_line(error)}"


def _fault_of(path: Path) -> str | None:
    """Return what is wrong with a file, as a phrase that follows its name; None: nothing that can be seen."""
    try:
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                return IS_POINTER
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                return None
        if path.suffix == ".json":
            json.loads(path.read_bytes())
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        return f"cannot be read: {first_line(error)}; it may be cut off: fetch it again"
    return None

"""A quantised checkpoint's tensors by the names of the unquantised model, and the loading of that model.

One rule for every machine: weights are dequantised to the dtype in which the model is to run, so that no kernel or package of a
scheme is needed and every part of the project finds ordinary matrices. Left out on purpose: what engines quantise besides,
activations and the cache, so that their logits differ a little from these.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from configs.runtime.errors import InputError
from configs.runtime.files import read_json
from heads.frozen.checkpoint_files import PACKED_NAMES, Weights, listed, read_weights
from heads.frozen.model_config import auto_class
from heads.frozen.quantized.schemes import FLOAT8, Settings, packed_matrices

log = logging.getLogger("draftsmith")

GIB = 2**30
# Of activations and the cache, which stay in floating point here.
UNREAD = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "q_scale", "k_scale", "v_scale")


def quantization_of(folder: Path) -> Settings | None:
    """Return what a checkpoint's config says of its quantisation, with a `quant_method`; None: nothing, or there is no config.

    Raises:
        InputError: the config is not JSON.
    """
    path = folder / "config.json"
    config = read_json(path, "config of the model") if path.is_file() else None
    text = config.get("text_config") if isinstance(config, dict) else None
    for part in (config, text):
        settings = (part.get("quantization_config") or part.get("compression_config")) if isinstance(part, dict) else None
        if isinstance(settings, dict):
            settings = settings | (settings.get("quantization_config") or {})
            of_old = "bitsandbytes" if settings.get("load_in_4bit") or settings.get("load_in_8bit") else "a method not named"
            return settings | {"quant_method": settings.get("quant_method") or of_old}
    return None


def read_float_weights(folder: Path) -> Weights:
    """Return a checkpoint's tensors by the names of the unquantised model; packed ones are unpacked when they are read.

    Raises:
        InputError: it is quantised in a way that is not known, or its tensors are not those of its scheme.
    """
    settings, weights = quantization_of(folder), read_weights(folder, packed=True)
    try:
        matrices = [] if settings is None else packed_matrices(weights, settings)
    except InputError as error:
        raise InputError(f"{folder} cannot be read: {error}") from error
    used = {name for matrix in matrices for name in matrix.parts.values()}
    unread = () if settings is None else UNREAD
    rest = {name: stored for name, stored in weights.items() if name not in used and not name.endswith(unread)}
    meaningless = FLOAT8 if settings is None else tuple(PACKED_NAMES.values())
    left = [name for name, stored in rest.items() if stored.dtype in meaningless]
    if left:
        says = "names no quantisation" if settings is None else f"({settings['quant_method']}) gives them no scales"
        raise InputError(
            f"{folder} cannot be read: {listed(left)} are {rest[left[0]].dtype} numbers, and its config.json {says}; give an "
            "unquantised copy of the model"
        )
    return rest | {matrix.name: matrix.read_from(weights) for matrix in matrices}


def loader_of(folder: Path, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Callable[..., PreTrainedModel]:
    """Return what loads the model in a folder, by its own class, given further arguments of `from_pretrained`.

    One that is quantised is dequantised, and the log says how much memory that takes.

    Raises:
        InputError: it is quantised, and its weights cannot be had; before anything is loaded.
    """
    if (settings := quantization_of(folder)) is None:
        return partial(_load_as_stored, folder, dtype=dtype, trust_remote_code=trust_remote_code)
    weights = read_float_weights(folder)
    numbers = sum(math.prod(stored.shape) for stored in weights.values() if stored.dtype.is_floating_point)
    log.warning(
        "%s is quantised (%s) and is run dequantised to %s: about %.2f GiB of memory, where its files take %.2f",
        folder,
        settings["quant_method"],
        str(dtype).removeprefix("torch."),
        numbers * dtype.itemsize / GIB,
        sum(path.stat().st_size for path in folder.glob("*.safetensors")) / GIB,
    )
    return partial(_load_dequantised, folder, weights, dtype=dtype, trust_remote_code=trust_remote_code)


def _load_as_stored(folder: Path, **arguments: Any) -> PreTrainedModel:
    trust_remote_code = arguments["trust_remote_code"]
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    load = auto_class(config).from_pretrained  # which returns a pair where the report is asked for
    model, report = load(folder, use_safetensors=True, local_files_only=True, output_loading_info=True, **arguments)
    read_float_weights(folder)  # refuses numbers without their scales, which transformers casts as they are
    return _whole(model, report, folder)


def _load_dequantised(folder: Path, weights: Weights, *, trust_remote_code: bool, **arguments: Any) -> PreTrainedModel:
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

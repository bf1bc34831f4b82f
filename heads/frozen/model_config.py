"""What a target's config says: the class of transformers that runs it, and the configs of drafts that have its blocks.

A draft with blocks of the text part of a model that also takes images or sound is a causal LM where transformers has one with
the same blocks, so that any program that serves causal LMs serves it. A config describes its blocks in several ways, which are
rewritten for the kept ones; whether that describes them is for the caller to check.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

from configs.runtime.errors import InputError

# Text parts whose rotary embedding is that of these causal LMs where a token's three positions are equal, as in text.
ON_TEXT = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
ALWAYS_SET = {"qwen3_moe": {"norm_topk_prob": True}}  # what text parts do without a setting of it
NOT_BY_BLOCK = ("_id", "_ids", "architectures")  # endings of keys whose lists may have as many entries by chance


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the auto class that loads and builds models of this config."""
    its_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    is_multimodal = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForMultimodalLM if is_multimodal and not its_own_code else AutoModelForCausalLM


def causal_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a causal LM with the blocks of this text config: itself, or of text parts that of `ON_TEXT`."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "auto_map", None) is not None:
        return config
    if config.model_type not in ON_TEXT:
        raise InputError(
            f"transformers has no causal LM with the blocks of {config.model_type}, the text part of the target; take a draft "
            "of another family: student.init 'model' or 'config'"
        )
    values = {name: value for name, value in config.to_dict().items() if name != "model_type"}
    rope = {name: value for name, value in values["rope_parameters"].items() if not name.startswith("mrope")}
    plain = ON_TEXT[config.model_type]
    kept: PreTrainedConfig = CONFIG_MAPPING[plain].from_dict(values | {"rope_parameters": rope} | ALWAYS_SET.get(plain, {}))
    return kept


def per_layer_keys(config: PreTrainedConfig) -> list[str]:
    """Return the keys of a text config whose value is a list with an entry for each block."""
    return [
        name
        for name, value in config.to_dict().items()
        if isinstance(value, list) and len(value) == config.num_hidden_layers and not name.endswith(NOT_BY_BLOCK)
    ]


def attentions_per_block(config: PreTrainedConfig) -> int:
    """Return how many of a text config's `num_hidden_layers`, each with a place in the cache, make one block."""
    return 2 if config.model_type == "longcat_flash" else 1


def overridden(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a copy of a text config with some values replaced; what it says of each block goes with another number of them."""
    values = config.to_dict()
    if "num_hidden_layers" in overrides:
        dropped = {*per_layer_keys(config), "per_layer_config"}
        values = {name: value for name, value in values.items() if name not in dropped}
    return type(config).from_dict(values | dict(overrides))


def config_of_blocks(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """Return a copy of a text config for a model of these blocks only, in this order."""
    kept, values = copy.deepcopy(config), config.to_dict()
    changed: dict[str, Any] = {name: [values[name][layer] for layer in layers] for name in per_layer_keys(config)}
    changed |= _mixers(config, layers) | _experts(config, layers)
    if (given := values.get("per_layer_config")) is not None:  # by number, what a block has other than the rest
        given = {int(number): differences for number, differences in given.items()}
        changed["per_layer_config"] = {new: given[layer] for new, layer in enumerate(layers) if layer in given}
    try:
        kept.per_layer_config = None
        kept.num_hidden_layers = len(layers) * attentions_per_block(config)
        for name, value in changed.items():
            setattr(kept, name, value)
        return type(config).from_dict(kept.to_dict())  # as it will be read from the draft's folder
    except (ValueError, TypeError, AttributeError, IndexError, NotImplementedError, StrictDataclassError) as error:
        raise InputError(
            f"student.layers: blocks {', '.join(map(str, layers))} of a {config.model_type} model cannot be kept, since its "
            f"config cannot describe them ({' '.join(str(error).split())}); keep others, of every kind of block perhaps"
        ) from error


def _experts(config: PreTrainedConfig, layers: Sequence[int]) -> dict[str, Any]:
    """Return the keys that give dense blocks and blocks of experts their places, for the kept blocks."""
    changed: dict[str, Any] = {}
    for name in ("first_k_dense_replace", "num_dense_layers"):  # the blocks before this one are dense
        if (first_sparse := getattr(config, name, None)) is not None:
            changed[name] = sum(layer < first_sparse for layer in layers)
    if (moe_layers := getattr(config, "moe_layers", None)) is not None:  # Llama 4
        changed["moe_layers"] = [new for new, layer in enumerate(layers) if layer in moe_layers]
    if (step := getattr(config, "decoder_sparse_step", None)) is not None:  # Qwen
        dense = set(getattr(config, "mlp_only_layers", None) or ())
        changed["mlp_only_layers"] = [n for n, layer in enumerate(layers) if layer in dense or step < 1 or (layer + 1) % step]
        changed["decoder_sparse_step"] = 1
    return changed


def _mixers(config: PreTrainedConfig, layers: Sequence[int]) -> dict[str, Any]:
    """Return the keys by which blocks of attention and others have their places, where no list says it, for the kept blocks."""
    changed: dict[str, Any] = {}
    for name in ("attn_layer_indices", "full_attn_idxs"):  # Bamba, LFM2
        if (numbers := getattr(config, name, None)) is not None:
            changed[name] = [new for new, layer in enumerate(layers) if layer in numbers]
    if shared := getattr(config, "num_kv_shared_layers", None):  # Gemma 3n, Gemma 4: the last ones
        changed["num_kv_shared_layers"] = sum(layer >= config.num_hidden_layers - shared for layer in layers)
    return changed

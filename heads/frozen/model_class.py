"""Which class of transformers runs a model: causal LMs have their own, and so have models that also take images or sound.

Of the latter only the text part is used (`heads.inference.causal_lm.backbone`). transformers may have the same blocks as a
causal LM too, of which drafts are made, so that any program that serves causal LMs serves them.
"""

from __future__ import annotations

from typing import Any

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


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the auto class that loads and builds models of this config."""
    its_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    is_multimodal = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForMultimodalLM if is_multimodal and not its_own_code else AutoModelForCausalLM


def causal_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a causal LM with the blocks of this text config: itself, or of text parts that of `ON_TEXT`.

    Raises:
        InputError: it is of the text part of a model, and transformers has no causal LM with its blocks.
    """
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

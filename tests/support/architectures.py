"""A tiny config and model for every name of the installed transformers' causal-LM mapping, and for variants of some.

No list of names is kept: a config's own keys are looked up in `SIZES`, and a list with an entry for each block gets four
entries, each kind of entry in turn. `OVERRIDES` has what a config needs besides. Windows, chunks and original rope lengths are
16 tokens, so that texts of 30 are longer than each.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from heads.frozen.loading import load_with
from heads.frozen.weights import auto_class
from tests.support.media_models import MEDIA_FAMILIES

VOCAB_SIZE = 256
NUM_BLOCKS = 4
SPAN = 16  # of windows, chunks, and rope before it is stretched
GAIN, EMBEDDING_GAIN = 1.6, 0.3
ROUTING_BIAS = "e_score_correction_bias"
MOST_PARAMETERS = 20_000_000  # a size that was missed would take the machine's memory

# Value by key, under whatever name a family has it.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_dim", "word_embed_proj_dim", "dim_model_base"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "decoder_layers"), NUM_BLOCKS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "kv_n_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "global_head_dim", "attention_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "n_ctx"), 128),
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "keep_window_size"), SPAN
    ),
    **dict.fromkeys(("attention_chunk_size", "original_max_position_embeddings"), SPAN),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_experts_intermediate_size"), 32),
    "moe_shared_expert_intermediate_size": 32,
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("index_n_heads", "index_head_dim", "index_topk"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), SPAN),
    **dict.fromkeys(("use_mamba_kernels", "use_cuda_kernels"), False),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 0),
    "eos_token_id": None,
    # Scales, which are 1 by default in some families.
    **dict.fromkeys(("logits_scaling", "embedding_multiplier"), 2.0),
    **dict.fromkeys(("attention_multiplier", "residual_multiplier", "lm_head_multiplier"), 0.5),
    "image_size": 28,
    **dict.fromkeys(("embed_dim", "out_hidden_size", "adapter_input_size", "adapter_in_dim", "adapter_out_dim"), 64),
    "depth": 2,
    "patch_size": 14,
}
HYBRID = ["linear_attention", "full_attention"] * 2
MIXED = ["sliding_attention", "full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SECTIONS = ROPE | {"mrope_section": [2, 3, 3]}
# Besides, by family. Windows and states that a family has in few blocks are to stand beside others here.
OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": VOCAB_SIZE},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": MIXED,
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {"hidden_size": 64}},
    "dots3_note_text": {
        "per_layer_config": {},
        "head_dim": 16,
        "rope_parameters": {kind: ROPE | {"partial_rotary_factor": 0.5} for kind in ("indexed_attention", "sliding_attention")},
    },
    "emu3_vqgan": {"base_channels": 32, "codebook_size": VOCAB_SIZE, "embed_dim": 4},
    "emu3": {"vocabulary_map": {"<image>": 1, "<|extra_200|>": 2}},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": HYBRID},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "longcat_flash": {"zero_expert_num": 2},
    **{name: {"layer_types": ["conv", "full_attention"] * 2} for name in ("lfm2", "lfm2_moe")},
    "llama4_text": {"moe_layers": [1, 2]},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": MIXED},
    **{name: {"rope_parameters": SECTIONS} for name in ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text")},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        **dict.fromkeys(("index_n_heads", "index_topk_blocks"), 2),
        "index_block_size": 4,
    },
    "olmo_hybrid": {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
    "qwen2_moe": {"mlp_only_layers": [1], "decoder_sparse_step": 1},
    "qwen4_exp_text": {
        **dict.fromkeys(("indexer_n_heads", "indexer_budget"), 8),
        "indexer_kv_heads": 1,
        "indexer_compress_ratio": 2,
        "indexer_head_dim": 16,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "xlstm": {"qk_dim_factor": 1.0},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}
SHORT = {"original_max_position_embeddings": SPAN}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + place for place in range(8)],
} | SHORT
# Name: the family, and what differs. The last are known as models that read images or sounds, whose text part is checked.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3, longrope": ("phi3", {"rope_parameters": LONG_ROPE}),
    "phimoe, longrope": ("phimoe", {"rope_parameters": LONG_ROPE | {"short_mscale": 1.0, "long_mscale": 1.2}}),
    "llama, yarn": ("llama", {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0} | SHORT}),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "falcon, grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "qwen2, sliding": ("qwen2", {"use_sliding_window": True, "layer_types": MIXED}),
    "gemma4_text, shared": ("gemma4_text", {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}),
    "granitemoehybrid, dense": ("granitemoehybrid", {"layer_types": ["full_attention"] * 4, "num_local_experts": 0}),
    "nemotron_h, attention": ("nemotron_h", {"layers_block_type": ["moe", "attention"] * 2}),
    "deepseek_v3, no q rank": ("deepseek_v3", {"q_lora_rank": None}),
    "opt, narrow embedding": ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    **{
        name: (name, {})
        for name in (
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3_vl",
            "mistral3",
            "llava",
            "internvl",
            "idefics3",
            "aya_vision",
            "glm4v",
            "kimi_k25",
            "qwen2_audio",
            "glmasr",
        )
    },
}


def names() -> list[str]:
    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]


def not_a_decoder(name: str) -> str | None:
    """Return why a name of the mapping stands for no causal LM of its own; None: it does."""
    # Decoders that read sound stand in that mapping, too, and are variants here.
    listed = name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and name not in VARIANTS
    if listed or default_config(name).is_encoder_decoder:
        return "the decoder half of an encoder-decoder model"
    values = default_config(name).to_dict()
    reads_an_encoder = values.get("is_decoder") is False and not {
        "add_cross_attention",
        "cross_attention_hidden_size",
    }.isdisjoint(values)
    if name in MODEL_FOR_MASKED_LM_MAPPING_NAMES or reads_an_encoder:
        return "an encoder, with a causal head for use beside others"
    return None


@cache
def default_config(name: str) -> PreTrainedConfig:
    return CONFIG_MAPPING[name]()


def tiny_config(name: str) -> PreTrainedConfig:
    family, changes = VARIANTS.get(name, (name, {}))
    return _shrunk(default_config(family), MEDIA_FAMILIES[name].changes if name in MEDIA_FAMILIES else changes)


def tiny_model(name: str, seed: int = 3) -> PreTrainedModel:
    """Return a random model of a name of `names`, in float32, frozen, in evaluation mode."""
    config = tiny_config(name)
    # With its vision part where it has one, as checkpoints do.
    has_parts = bool(config.sub_configs) and family_of(name) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    kind = AutoModelForImageTextToText if has_parts else auto_class(config)

    def build(attention: str) -> PreTrainedModel:
        return kind.from_config(config, dtype=torch.float32, attn_implementation=attention)

    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in load_with("sdpa", build).parameters())
    if size > MOST_PARAMETERS:
        large = {key: value for key, value in config.to_dict().items() if type(value) is int and value > VOCAB_SIZE}
        raise ValueError(f"the tiny config of {name} makes a model of {size} parameters: {large}")
    torch.manual_seed(seed)
    model = load_with("sdpa", build)
    # By itself a tiny random model would repeat a token for ever, whatever its blocks compute.
    embedding = model.requires_grad_(False).get_input_embeddings().weight
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            _to_gain(parameter, EMBEDDING_GAIN if parameter is embedding else GAIN)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(ROUTING_BIAS):  # zero by itself, which no dtype rounds
            tensor.uniform_(0, 0.1)
    return model.eval()


def family_of(name: str) -> str:
    return VARIANTS.get(name, (name, {}))[0]


def _shrunk(default: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    values, changes = default.to_dict(), {**OVERRIDES.get(default.model_type, {}), **changes}
    parts = {name for name in default.sub_configs if isinstance(getattr(default, name, None), PreTrainedConfig)}
    blocks = next(
        (values[name] for name, size in SIZES.items() if size == NUM_BLOCKS and "layer" in name and name in values), 0
    )
    sizes: dict[str, Any] = {}
    for key, value in values.items():
        if key in SIZES:
            sizes[key] = SIZES[key]
        elif isinstance(value, list) and len(value) == blocks > 0:
            kinds = list(dict.fromkeys(value))
            sizes[key] = [kinds[block % len(kinds)] for block in range(NUM_BLOCKS)]
    if "qk_rope_head_dim" in values:  # multi-head latent attention: keys for every head, whose width follows from its parts
        sizes |= {"num_key_value_heads": 4} | ({"head_dim": SIZES["qk_rope_head_dim"]} if "head_dim" in values else {})
    for part in parts:
        sizes[part] = _shrunk(getattr(default, part), changes.get(part, {})).to_dict()
    return type(default)(**sizes | {key: value for key, value in changes.items() if key not in parts})


def _to_gain(weight: Tensor, gain: float) -> None:
    """Scale a weight so that it makes numbers `gain` times the size of its inputs; where it is zero, draw it."""
    size = float(weight.square().mean().sqrt())
    weight.copy_(torch.randn_like(weight) if size == 0 else weight / size).mul_(gain * weight.shape[-1] ** -0.5)


def word_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)

"""Tiny configs of many families, with what each says of its blocks one by one: 4 blocks, windows shorter than the texts."""

from functools import cache

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB_SIZE = 256
NO_ENDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
OLD = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **NO_ENDS,
}
NEW = OLD | {"intermediate_size": 96, "num_key_value_heads": 2}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = NEW | EXPERTS | LATENT | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]}
SPARSE_LISTS = WINDOW | EXPERTS | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}

CONFIGS = {
    "llama": NEW,
    "olmo": NEW,
    "llama4_text": NEW
    | {"intermediate_size_mlp": 96, "head_dim": 16, "num_local_experts": 4, "moe_layers": [1, 2], "attention_chunk_size": 16},
    "smollm3": NEW | {"no_rope_layers": [1, 0, 1, 0]},
    "gpt2": OLD,
    "gpt_bigcode": OLD,
    "gpt_neox": OLD | {"intermediate_size": 96},
    "gptj": OLD | {"rotary_dim": 8},
    "codegen": OLD | {"rotary_dim": 8},
    "opt": OLD | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "falcon": OLD,
    "mpt": {"vocab_size": VOCAB_SIZE, "d_model": 64, "n_layers": 4, "n_heads": 4, "max_seq_len": 64, **NO_ENDS},
    "phi": OLD | {"intermediate_size": 96},
    "persimmon": OLD | {"intermediate_size": 96},
    "gemma3_text": NEW | WINDOW | {"head_dim": 16},
    "gemma4_text": NEW | WINDOW | {"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0},
    "cohere2": NEW | WINDOW,
    "qwen2_moe": NEW
    | EXPERTS
    | {"num_experts": 4, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    "deepseek_v3": DEEPSEEK | {"first_k_dense_replace": 2},
    "glm4_moe": DEEPSEEK | {"first_k_dense_replace": 2, "head_dim": 16},
    "ernie4_5_moe": NEW | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_interval": 2},
    "cohere2_moe": NEW | SPARSE_LISTS | {"num_experts": 4},
    "exaone_moe": NEW | SPARSE_LISTS | {"num_experts": 4, "n_group": 1, "topk_group": 1},
    "mellum": NEW | SPARSE_LISTS | {"num_experts": 4, "head_dim": 16},
    "solar_open": NEW | EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 16},
    "diffllama": NEW,
    "minicpm3": NEW | LATENT | {"num_key_value_heads": 4},
}


@cache
def tiny_model(name):
    """Return a random model of a family, float32; only for reading."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**CONFIGS[name]), dtype=torch.float32)
    for parameter in model.parameters():  # the default initialisation is so flat that blocks would hardly differ
        parameter.requires_grad_(False).mul_(3.0 if parameter.ndim >= 2 else 1.0)
    return model.eval()

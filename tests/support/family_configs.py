"""Tiny configs of many families, with what each says of its blocks one by one: 4 blocks, windows shorter than the texts.

`HYBRIDS` are those that carry states: recurrent, linear-attention and convolutional blocks, some of them beside attention.
"""

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
    "gpt_neo": OLD | {"attention_types": [[["global", "local"], 2]], "window_size": 16},
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

LINEAR = {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}
CONV = {"layer_types": ["full_attention", "conv", "conv", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 4}
SOLE = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 4, **NO_ENDS}
HYBRIDS = {
    "qwen3_next": NEW
    | EXPERTS
    | LINEAR
    | DELTA
    | {"head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1]},
    "qwen3_5_text": NEW | LINEAR | DELTA | {"head_dim": 16},
    "olmo_hybrid": NEW | LINEAR | DELTA,
    "kimi_linear": NEW
    | EXPERTS
    | LINEAR
    | LATENT
    | {"num_key_value_heads": 4, "q_lora_rank": None, "num_local_experts": 4, "linear_head_dim": 16, "linear_num_heads": 4}
    | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    "granitemoehybrid": NEW | MAMBA | LINEAR | {"num_local_experts": 4, "shared_intermediate_size": 32},
    "bamba": NEW | MAMBA | {"attn_layer_indices": [0, 3]},
    "falcon_h1": NEW | MAMBA | {"mamba_d_ssm": 128, "lm_head_multiplier": 0.5},
    "nemotron_h": {name: value for name, value in NEW.items() if name != "num_hidden_layers"}
    | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_routed_experts": 4, "head_dim": 16}
    | {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 4}
    | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32},
    "jamba": NEW | {"num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 0, "mamba_d_state": 8, "mamba_dt_rank": 8},
    "lfm2": NEW | CONV | {"block_multiple_of": 8},
    "lfm2_moe": NEW | CONV | EXPERTS | {"num_experts": 4, "num_dense_layers": 1},
    "mamba": SOLE | {"state_size": 8},
    "mamba2": SOLE | {"num_heads": 4, "head_dim": 32, "state_size": 8, "n_groups": 1, "chunk_size": 4},
    "xlstm": SOLE | {"embedding_dim": 64, "num_blocks": 4, "num_heads": 4, "chunk_size": 8},
}


@cache
def tiny_model(name):
    """Return a random model of a family, float32; only for reading."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**(CONFIGS | HYBRIDS)[name]), dtype=torch.float32)
    for parameter in model.parameters():  # the default initialisation is so flat that blocks would hardly differ
        parameter.requires_grad_(False).mul_(3.0 if parameter.ndim >= 2 else 1.0)
    return model.eval()

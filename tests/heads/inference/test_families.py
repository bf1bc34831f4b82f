"""Decoding tiny models of many families gives the tokens of transformers' `generate`, or is refused by name.

Windows, chunks and the length of short rotary factors are 16 tokens, shorter than the texts; `docs/models.md` has the table.
"""

import copy
from functools import cache

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import generate
from heads.frozen.hidden_states import final_norm
from heads.frozen.loading import Target, load_with
from heads.inference.causal_lm import forward_rows, new_cache, read_documents
from heads.inference.column_positions import first_of_equals
from heads.inference.model_checks import check_rolls_back, check_split
from heads.inference.runner import WRONG_STATES, runner_of
from heads.proposers.draft_lm import DraftLM
from heads.sampling.token_tree import tree_attention
from tests.support.family_configs import tiny_model

SIZE = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
BLOCK = SIZE | {"num_attention_heads": 4, "intermediate_size": 96}
GROUPED = BLOCK | {"num_key_value_heads": 2, "head_dim": 16}
MOE = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
CHUNKED = {"attention_chunk_size": 16, "layer_types": ["chunked_attention", "full_attention"]}
OLD = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + place for place in range(8)],
    "original_max_position_embeddings": 16,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
SHARED = SLIDING | {
    "num_hidden_layers": 4,
    "layer_types": SLIDING["layer_types"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 8,
}
DEEPSEEK = (
    BLOCK
    | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    | {"qk_nope_head_dim": 8, "v_head_dim": 16}
)
DSA = DEEPSEEK | {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 8}
NEMOTRON = (
    GROUPED
    | {"layer_types": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16}
    | {"n_groups": 2, "chunk_size": 8}
)

# name: config class, its settings (None: a name of the models check), and the refusals: by way of decoding, or of all
TABLE = {
    "bloom": ("BloomConfig", {"vocab_size": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4}, {}),
    "codegen": ("CodeGenConfig", OLD | {"rotary_dim": 8}, {}),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK | {"first_k_dense_replace": 1}, {}),
    "doge": ("DogeConfig", GROUPED | {"keep_window_size": 16}, {}),
    "deepseek_v32": ("DeepseekV32Config", DSA, {}),
    "deepseek_v32_ties": ("DeepseekV32Config", DSA | {"index_n_heads": 1}, {}),
    "dots3_note": ("dots3_note_text", None, {}),
    "falcon": ("FalconConfig", BLOCK | {"new_decoder_architecture": False}, {}),
    "falcon_alibi": ("FalconConfig", BLOCK | {"new_decoder_architecture": False, "alibi": True}, {}),
    "gemma2": ("Gemma2Config", GROUPED | SLIDING, {}),
    "gemma3": ("Gemma3TextConfig", GROUPED | SLIDING, {}),
    "gemma3n": ("Gemma3nTextConfig", GROUPED | SHARED | {"laurel_rank": 4, "activation_sparsity_pattern": None}, {}),
    "gemma4": ("Gemma4TextConfig", GROUPED | SHARED | {"global_head_dim": 16}, {}),
    "gpt2": ("GPT2Config", OLD, {}),
    "gpt_neo": (
        "GPTNeoConfig",
        SIZE | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 16},
        {},
    ),
    "gpt_neox": ("GPTNeoXConfig", BLOCK, {}),
    "gpt_oss": ("GptOssConfig", GROUPED | SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "gptj": ("GPTJConfig", OLD | {"rotary_dim": 8}, {}),
    "granite4_dense": ("GraniteMoeHybridConfig", GROUPED | {"layer_types": ["attention"] * 2, "num_local_experts": 0}, {}),
    "bamba": ("BambaConfig", GROUPED | MAMBA2 | {"attn_layer_indices": [1]}, {}),
    "falcon_h1": ("FalconH1Config", GROUPED | MAMBA2 | {"mamba_d_ssm": 128, "lm_head_multiplier": 0.5}, {}),
    "granite4_hybrid": (
        "GraniteMoeHybridConfig",
        GROUPED | MAMBA2 | {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2},
        {},
    ),
    "inkling": (
        "inkling_text",
        None,
        {"batch": "rows of unequal lengths.* batch_size 1", "tree": "drafts of a tree.* tree null"},
    ),
    "jamba": (
        "JambaConfig",
        GROUPED
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 8, "use_mamba_kernels": False},
        {},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        MOE
        | LATENT
        | {"layer_types": LINEAR["layer_types"], "first_k_dense_replace": 1, "num_key_value_heads": 4}
        | {"linear_attn_config": {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}},
        {},
    ),
    "lfm2": ("Lfm2Config", GROUPED | {"layer_types": ["conv", "full_attention"]}, {}),
    "llama": ("LlamaConfig", GROUPED, {}),
    "llama4": ("Llama4TextConfig", GROUPED | {"num_local_experts": 2, "intermediate_size_mlp": 96} | CHUNKED, {}),
    "mamba": ("MambaConfig", {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2}, {}),
    "mamba2": (
        "Mamba2Config",
        {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "n_groups": 2}
        | {"state_size": 16, "chunk_size": 8},
        {},
    ),
    "minimax": (
        "MiniMaxConfig",
        GROUPED | {"layer_types": LINEAR["layer_types"]},
        "carries the past in states.* not run on a cache",
    ),
    "longcat_flash": (
        "LongcatFlashConfig",
        {name: value for name, value in BLOCK.items() if name != "num_hidden_layers"}
        | {"num_layers": 2, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 32}
        | {"ffn_hidden_size": 96, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "head_dim": 8}
        | {"qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4},
        {},
    ),
    "minimax_m3": (
        "MiniMaxM3VLTextConfig",
        GROUPED
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 96, "index_n_heads": 2}
        | {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_head_dim": 16, "index_block_size": 4}
        | {"index_topk_blocks": 2, "index_local_blocks": 1},
        {"tree": "drafts of a tree.* tree null"},
    ),
    "mistral": ("MistralConfig", GROUPED | {"sliding_window": 16}, {}),
    "mpt": (
        "MptConfig",
        {"vocab_size": 256, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
        {"tree": "drafts of a tree.* tree null"},
    ),
    "nemotron_h": ("NemotronHConfig", GROUPED | {"layer_types": ["moe", "attention"], "n_routed_experts": 4}, {}),
    "nemotron_h_hybrid": ("NemotronHConfig", NEMOTRON, {}),
    "nemotron_h_bounded": ("NemotronHConfig", NEMOTRON | {"time_step_min": 0.5}, {}),  # in transformers' uncached forward only
    "olmo_hybrid": ("OlmoHybridConfig", GROUPED | LINEAR | {"linear_num_value_heads": 2}, {}),
    "opt": ("OPTConfig", SIZE | {"num_attention_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64}, {}),
    "persimmon": ("PersimmonConfig", BLOCK, {}),
    "phi": ("PhiConfig", BLOCK, {}),
    "phi3_longrope": ("Phi3Config", GROUPED | {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 16}, {}),
    "phimoe_longrope": (
        "PhimoeConfig",
        GROUPED | {"rope_parameters": LONG_ROPE | {"short_mscale": 1.0, "long_mscale": 1.2}},
        {},
    ),
    "phi3": ("Phi3Config", GROUPED, {}),
    "qwen2_sliding": ("Qwen2Config", GROUPED | SLIDING | {"use_sliding_window": True}, {}),
    "qwen3": ("Qwen3Config", GROUPED, {}),
    "qwen3_moe": ("Qwen3MoeConfig", MOE, {}),
    "qwen3_5": ("Qwen3_5TextConfig", GROUPED | LINEAR, {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", MOE | LINEAR | {"shared_expert_intermediate_size": 32}, {}),
    "qwen3_next": ("Qwen3NextConfig", MOE | LINEAR | {"shared_expert_intermediate_size": 32}, {}),
    "zaya": ("ZayaConfig", GROUPED | {"num_experts": 4, "sliding_window": 16, "layer_types": ["hybrid", "hybrid_sliding"]}, {}),
}
PROMPTS = [list(range(3, 14)), list(range(40, 47)), list(range(90, 96))]
NEW = 20
WAYS = {
    "chain": (PROMPTS[:1], {}),
    "batch": (PROMPTS, {"batch_size": 3}),
    "tree": (PROMPTS[:1], {"tree": {"kind": "static", "branching": [2, 2, 1]}}),
}


def changed(model, seed, change):
    """Apply `change` to every matrix of a model, and leave it frozen."""
    torch.manual_seed(seed)
    for parameter in model.eval().requires_grad_(False).parameters():
        if parameter.ndim >= 2:
            change(parameter)
    return model


@cache
def built(name):
    """Return a random model of this family, in which few logits are near ties."""
    kind, settings, _ = TABLE[name]
    if settings is None:
        return tiny_model(kind)
    config = getattr(transformers, kind)(**settings, **ENDS)
    torch.manual_seed(0)
    model = load_with(
        "sdpa", lambda kernel: AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=kernel)
    )
    changed(model, 0, lambda matrix: matrix.mul_(3.0))
    check_split(model)
    return model


def target_of(name):
    return Target(model=built(name), tokenizer=None, identity=None, eos_token_ids=())


def decoded(name, way):
    """Decode with a draft that is a copy with some noise, and so is often right."""
    draft = changed(copy.deepcopy(built(name)), 1, lambda matrix: matrix.add_(0.05 * matrix.std() * torch.randn_like(matrix)))
    prompts, settings = WAYS[way]
    return generate(target_of(name), prompts, DecodeConfig(max_new_tokens=NEW, **settings), DraftLM(draft, 256))


@cache
def plain(name, number):
    """Return what transformers' `generate` answers to a prompt, up to the longest text that the target can have."""
    ids_1T = torch.tensor([PROMPTS[number]])
    with first_of_equals(built(name).config):
        text_1T = built(name).generate(ids_1T, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return text_1T[0, ids_1T.shape[1] : target_of(name).max_positions].tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TABLE)
def test_a_family_decodes_as_transformers_does_or_is_refused(name, way):
    refused = TABLE[name][2]
    reason = refused.get(way) if isinstance(refused, dict) else refused
    if reason is None:
        assert decoded(name, way) == [plain(name, number) for number in range(len(WAYS[way][0]))]
        return
    with pytest.raises(InputError, match=reason):
        decoded(name, way)


def test_of_keys_of_equal_scores_the_first_are_seen_where_transformers_takes_others_with_a_cache_than_without():
    scores_BT = torch.tensor([[0.0, 2.0, 0.0, -1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 3.0, 1.0, 1.0]])
    with first_of_equals(built("deepseek_v32_ties").config):
        chosen = [scores_BT.topk(3).indices.tolist(), torch.topk(scores_BT, 3, dim=-1).indices.tolist()]
    naive = [sorted(range(6), key=lambda column: (-row[column], column))[:3] for row in scores_BT.tolist()]
    assert chosen == [naive, naive]
    with first_of_equals(built("llama").config):
        assert not torch.overrides._get_current_function_mode_stack()
    model, ids_1T = built("deepseek_v32_ties"), torch.tensor([PROMPTS[0]])
    text_1T = model.generate(ids_1T, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    uncached = model(input_ids=text_1T, use_cache=False).logits[0, ids_1T.shape[1] - 1 : -1].argmax(-1)
    assert uncached.tolist() != text_1T[0, ids_1T.shape[1] :].tolist()
    assert uncached.tolist() != plain("deepseek_v32_ties", 0)


def test_what_a_check_found_wrong_is_refused_wherever_it_is_run():
    model, cache_ = copy.deepcopy(built("mpt")), new_cache(built("mpt"), 8)
    check_rolls_back(model)
    ids_BT = torch.tensor([[1, 2], [3, 4]])
    forward_rows(model, cache_, ids_BT, [0, 0])
    attention = tree_attention(torch.tensor([[0, 0]] * 2), [2, 2])
    with pytest.raises(InputError, match="drafts of a tree"):
        forward_rows(model, cache_, torch.tensor([[1, 2, 3]] * 2), [2, 2], attention)
    forward_rows(model, cache_, ids_BT, [2, 1])
    runner_of(model).refused = frozenset(WRONG_STATES)
    with pytest.raises(InputError, match="rows of unequal lengths"):
        forward_rows(model, cache_, ids_BT, [2, 1])


def test_a_text_beyond_the_short_rotary_factors_is_refused_with_the_remedy():
    model = built("phi3_longrope")
    with pytest.raises(InputError, match=r"more than 16 tokens, and this one has 17; .*short_factor to the values of long"):
        forward_rows(model, new_cache(model, 20), torch.arange(17).unsqueeze(0), [0])


@pytest.mark.parametrize("name", sorted(name for name, (*_, refused) in TABLE.items() if not isinstance(refused, str)))
def test_the_final_norm_is_the_one_that_makes_the_states_of_the_head(name):
    model = built(name)
    seen = []
    final_norm(model).register_forward_hook(lambda _, args, output: seen.append(output))
    ids_1T = torch.tensor([PROMPTS[0]])
    torch.testing.assert_close(read_documents(model, ids_1T, None), seen[-1])

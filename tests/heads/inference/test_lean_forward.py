"""The lean forward gives transformers' logits on a probe, and says no to what it does not know; trees: `test_tree_nodes`."""

from copy import deepcopy
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from configs.schema.target import TargetConfig
from eval.decoder.decode import decode, generate
from eval.lossless import judge_lossless
from heads.artifact import load_draft, save_draft_lm
from heads.frozen.loading import load_target
from heads.inference import lean_forward
from heads.inference.lean_forward import forward_name, make_lean
from heads.inference.runner import runner_of
from tests.support.decoding import metadata_of_draft_lm, requests_for
from tests.support.family_checks import SMALL

GROUPED = SMALL | {"num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": None}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "llama, a head for each query, biases": LlamaConfig(**GROUPED | {"num_key_value_heads": 4}, attention_bias=True),
    "llama, tied, scaled rotary": LlamaConfig(
        **GROUPED,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3 | {"rope_theta": 1e4, "original_max_position_embeddings": 16},
    ),
    "mistral, sliding": MistralConfig(**GROUPED, sliding_window=4),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "qwen3, sliding": Qwen3Config(**GROUPED, head_dim=16, **SLIDING),
}


@cache
def model_of(name, dtype=torch.float32):
    """Return a random model, with norms and biases that are not 1 and 0; only for reading."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.mul_(4.0)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_form_of_a_known_family_gives_transformers_logits_on_a_probe_with_tokens_taken_back(name):
    make_lean(deepcopy(model_of(name)))


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "attention"), [(GPTNeoXConfig(**SMALL), "sdpa"), (CONFIGS["llama"], "eager")])
def test_another_family_and_another_attention_are_refused(config, attention):
    model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=attention)
    with pytest.raises(InputError, match=r"the lean forward knows Llama, Mistral, Qwen2, Qwen3 with target\.attention sdpa"):
        make_lean(model)
    assert not runner_of(model).forward


@pytest.mark.parametrize("part", ["norm", "rotary", "scale"])
def test_a_model_of_a_known_family_that_computes_otherwise_is_refused(part, monkeypatch):
    model = deepcopy(model_of("llama"))
    if part == "norm":
        model.model.norm.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    elif part == "rotary":
        monkeypatch.setattr(lean_forward, "angles", lambda embedding, like, positions_BT: _without_turning(like))
    else:
        model.model.layers[1].register_forward_hook(lambda _, args, output: output * 1.5 + args[0])
    with pytest.raises(InputError, match=r"differs from transformers' by .* set target\.forward to transformers"):
        make_lean(model)
    assert not runner_of(model).forward


def _without_turning(like):
    cos_BTH = like.new_ones(*like.shape[:2], 8)
    return cos_BTH, torch.zeros_like(cos_BTH)


def test_weights_that_are_not_packed_are_held_once():
    model = deepcopy(model_of("qwen2", torch.float64))  # oneDNN packs no float64, as it packs nothing off the CPU
    before = {name: each.clone() for name, each in model.named_parameters()}
    make_lean(model)
    block, attention = runner_of(model).forward._blocks[0], model.model.layers[0].self_attn
    for joined, layer in ((block.qkv, attention.q_proj), (block.qkv, attention.v_proj), (block.out, attention.o_proj)):
        assert joined.weight_OI.untyped_storage().data_ptr() == layer.weight.untyped_storage().data_ptr()
    assert all(each.equal(before[name]) for name, each in model.named_parameters())


@pytest.mark.parametrize(
    ("memory", "settings", "expected"),
    [
        (0.5, {}, "lean"),
        (0.0, {}, "transformers"),
        (0.5, {"attention": "eager"}, "transformers"),
        (0.5, {"device_map": "auto"}, "transformers"),
    ],
)
def test_auto_is_lean_where_family_memory_and_placement_have_it(tiny_run, monkeypatch, memory, settings, expected):
    monkeypatch.setattr(lean_forward, "MEMORY_SHARE", memory)
    config = TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu", forward="auto", **settings)
    assert forward_name(load_target(config).model) == expected


# --- in the decoder --------------------------------------------------------------------------------------------------

PROMPTS = [[5, 9, 6], [7, 12, 3, 44, 9, 20], [40, 11, 12, 2]]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def lean(request, tiny_run):
    return load_target(TargetConfig(name=str(tiny_run / "target"), dtype=request.param, device="cpu", forward="lean"))


def test_a_wrong_lean_forward_cannot_pass_for_rounding(lean, monkeypatch):
    config = DecodeConfig(max_new_tokens=8)
    right, _ = decode(lean, requests_for(PROMPTS), config)
    assert judge_lossless(lean, right, {"speculative": right}, config, LosslessConfig(), None)["verdict"] == "lossless"
    forward = runner_of(lean.model).forward
    logits = forward.logits
    monkeypatch.setattr(forward, "logits", lambda hidden: logits(hidden).roll(1, -1))
    wrong, _ = decode(lean, requests_for(PROMPTS), config)
    assert judge_lossless(lean, wrong, {"speculative": wrong}, config, LosslessConfig(), None)["verdict"] == "not_lossless"


def test_a_draft_of_another_family_runs_by_transformers_and_the_report_says_so(lean, tmp_path):
    model = AutoModelForCausalLM.from_config(GPTNeoXConfig(**SMALL), dtype=torch.float32)
    save_draft_lm(tmp_path / "artifact", model, lean.tokenizer, metadata_of_draft_lm(lean.identity.to_dict()))
    draft = load_draft(tmp_path / "artifact", lean.identity, lean.model)
    assert not runner_of(draft.proposer.model).forward
    assert len(draft.warnings) == 1
    assert "not GPTNeoXForCausalLM with sdpa; set target.forward to transformers" in draft.warnings[0]
    config = DecodeConfig(max_new_tokens=8)
    assert generate(lean, PROMPTS, config, draft.proposer) == generate(lean, PROMPTS, config)

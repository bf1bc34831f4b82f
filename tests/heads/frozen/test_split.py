"""What a target cannot be split by is refused in a sentence, before its weights are read."""

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from configs.runtime.errors import ConfigError, InputError
from configs.schema.evaluation import EvalConfig
from configs.schema.target import TargetConfig
from heads.frozen.processes import split_arguments

SHAPE = {"vocab_size": 16, "hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 3}
LLAMA = LlamaConfig(**SHAPE, num_attention_heads=6, num_key_value_heads=3, architectures=["LlamaForCausalLM"])
GPT2 = GPT2Config(vocab_size=16, n_embd=12, n_layer=2, n_head=2, architectures=["GPT2LMHeadModel"])
MIXTRAL = MixtralConfig(
    **SHAPE, num_attention_heads=6, num_key_value_heads=3, num_local_experts=5, architectures=["MixtralForCausalLM"]
)


@pytest.mark.parametrize(
    ("config", "parallel", "num_processes", "complaint"),
    [
        (
            LLAMA,
            {"shard": 3},
            4,
            "shard 3 makes groups of 3 processes, which do not divide the 4 of this run; start a",
        ),
        (LLAMA, {"tensor": 2}, 1, "tensor 2 makes groups of 2 processes, which do not divide the 1 of this run"),
        (LLAMA, {"tensor": 2}, 2, "tensor 2 does not divide the num_key_value_heads of LlamaForCausalLM, 3; give a divisor"),
        (LLAMA, {"tensor": 4}, 4, "tensor 4 does not divide the num_attention_heads of LlamaForCausalLM, 6; give a divisor"),
        (LLAMA, {"expert": 2}, 2, "no plan for expert parallelism of LlamaForCausalLM; give shard 2"),
        (GPT2, {"tensor": 2}, 2, "no plan for tensor parallelism of GPT2LMHeadModel; give shard 2"),
        (MIXTRAL, {"expert": 2}, 2, "expert 2 does not divide the num_experts of MixtralForCausalLM, 5; give a divisor"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_split_is_named(tmp_path, monkeypatch, config, parallel, num_processes, complaint):
    config.save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", str(num_processes))
    target = TargetConfig(name=str(tmp_path), device="cpu", parallel=parallel)
    with pytest.raises((ConfigError, InputError), match=f"^target.parallel: .*{complaint}"):
        split_arguments(tmp_path, target, torch.device("cpu"))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"parallel": {"tensor": 2, "shard": 2}}, "tensor 2 and shard 2 cannot be combined; give one of them"),
        ({"parallel": {"tensor": 2}, "device_map": "auto"}, "processes split the target, and device_map spreads it over"),
        ({"parallel": {"shard": 2}, "forward": "lean"}, "forward lean packs all weights on one device"),
        ({"parallel": {"shard": 2}, "name": "model.gguf"}, "model.gguf is unpacked whole; give a folder of safetensors"),
        ({"parallel": {"shard": 2}, "offload_folder": "off"}, "offload_folder says how a target is spread"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        TargetConfig.model_validate(settings)


def test_a_shared_target_is_not_timed_in_a_sweep():
    with pytest.raises(ValueError, match="cost times a target that is whole in its process"):
        EvalConfig.model_validate({"target": {"parallel": {"shard": 2}}, "cost": {}})


def test_a_group_of_one_is_no_group():
    assert TargetConfig(parallel={"tensor": 1}, device_map="auto").parallel.kind is None

"""What a target cannot be split by is a sentence, before its weights are read; DeepSpeed compiles nothing meanwhile."""

from importlib.util import find_spec

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from configs.runtime.errors import ConfigError, InputError
from configs.schema.target import TargetConfig
from heads.frozen import processes

SHAPE = {"vocab_size": 16, "hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 3}
LLAMA = LlamaConfig(**SHAPE, num_attention_heads=6, num_key_value_heads=3, architectures=["LlamaForCausalLM"])
GPT2 = GPT2Config(vocab_size=16, n_embd=12, n_layer=2, n_head=2, architectures=["GPT2LMHeadModel"])
MIXTRAL = MixtralConfig(
    **SHAPE, num_attention_heads=6, num_key_value_heads=3, num_local_experts=5, architectures=["MixtralForCausalLM"]
)


@pytest.mark.parametrize(
    ("config", "parallel", "num_processes", "complaint"),
    [
        (LLAMA, {"shard": 3}, 4, "shard 3 makes groups of 3 processes, which do not divide the 4 of this run; start"),
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
        processes.split_arguments(tmp_path, target, torch.device("cpu"))


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("fails", [False, True])
def test_deepspeeds_list_of_operators_is_another_while_processes_join_only(fails, monkeypatch):
    import deepspeed.ops

    def join(**settings):
        assert not deepspeed.ops.__compatible_ops__["any"]
        raise RuntimeError("no transport") if fails else ImportError("deepspeed")

    own = {"any": True}
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", own, raising=False)
    monkeypatch.setattr(processes, "PartialState", join)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises((RuntimeError, processes.InputError)):
        processes.join_processes(TargetConfig(device="cpu"))
    assert deepspeed.ops.__compatible_ops__ is own

"""Files of weights; a quantised target is run with the weights that its numbers stand for, under the identity of its files."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from configs.runtime.errors import InputError
from configs.schema.target import TargetConfig
from configs.schema.training import StudentConfig
from distill.student.init import initial_draft
from heads.artifact import load_draft, save_draft_lm
from heads.frozen.identity import hash_weights
from heads.frozen.loading import load_target
from heads.frozen.weights import write_weights
from tests.support.decoding import metadata_of_draft_lm
from tests.support.quantized_checkpoints import Scheme, fp8, mxfp4, quantise

FLOATS = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 16]}
SCALE = ".weight_scale_inv"
SCHEMES = {
    "fp8, blocks": Scheme(BLOCKS, fp8(SCALE, 16, 16)),
    "fp8, blocks cut off": Scheme(BLOCKS | {"weight_block_size": [24, 24]}, fp8(SCALE, 24, 24)),
    "fp8, scales as exponents": Scheme(BLOCKS, fp8(SCALE, 16, 16, as_exponents=True)),
    "fp8, one scale": Scheme(BLOCKS | {"weight_block_size": None}, fp8(SCALE, None, None)),
    "compressed-tensors, rows": Scheme(FLOATS, fp8(".weight_scale", 1, None, dtype=torch.bfloat16)),
    "compressed-tensors, blocks": Scheme(
        FLOATS | {"config_groups": {"group_0": {"weights": {"block_structure": [24, 24]}}}}, fp8(".weight_scale", 24, 24)
    ),
}

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


@pytest.fixture
def folder(tmp_path, tiny_run):
    """A model folder to be quantised."""
    return shutil.copytree(tiny_run / "target", tmp_path / "quantised")


def load(path, dtype="float32"):
    return load_target(TargetConfig(name=str(path), dtype=dtype, device="cpu"))


def assert_runs_with(target, meant):
    """Every weight is the one that is meant."""
    own = dict(target.model.named_parameters())
    assert own.keys() == meant.keys()
    for name, weight in meant.items():
        assert torch.equal(own[name], weight.to(own[name].dtype)), name


@pytest.mark.parametrize("name", SCHEMES)
def test_every_form_is_run_with_the_weights_that_its_numbers_stand_for(name, folder):
    meant = quantise(folder, SCHEMES[name])
    target = load(folder)
    assert_runs_with(target, meant)
    assert not hasattr(target.model.config, "quantization_config")


def test_the_experts_of_an_fp8_model_are_found_one_by_one_and_stacked(tmp_path, tiny_tokenizer):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, **experts))
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    meant = quantise(tmp_path, SCHEMES["fp8, blocks cut off"])
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in meant
    for layer in (0, 1):
        stem = f"model.layers.{layer}.mlp.experts"
        halves = [[meant.pop(f"{stem}.{expert}.{part}_proj.weight") for expert in range(4)] for part in ("gate", "up", "down")]
        meant[f"{stem}.gate_up_proj"] = torch.cat([torch.stack(halves[0]), torch.stack(halves[1])], 1)
        meant[f"{stem}.down_proj"] = torch.stack(halves[2])
    assert_runs_with(load(tmp_path), meant)


def test_the_experts_of_gpt_oss_are_mxfp4(tmp_path, tiny_tokenizer):
    config = GptOssConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        sliding_window=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    meant = quantise(tmp_path, Scheme(settings, mxfp4, which=("experts.gate_up_proj", "experts.down_proj"), left_out=("bias",)))
    assert_runs_with(load(tmp_path), meant)


@pytest.mark.parametrize(
    ("settings", "tensors", "words"),
    [
        ({"quant_method": "gptq"}, {".qweight": torch.zeros(4, 4, dtype=torch.int32)}, "names gptq"),
        ({"quant_method": "bitsandbytes"}, {".weight": torch.zeros(9, dtype=torch.uint8)}, "names bitsandbytes"),
        (FLOATS | {"transform_config": {"config_groups": {"a": {}}}}, None, "its weights cannot be dequantised"),
        (BLOCKS, {".weight": torch.zeros(9, 9).to(torch.float8_e4m3fn), ".weight_scale": torch.ones(2)}, "no blocks"),
    ],
)
def test_another_scheme_is_refused_with_what_to_give_before_anything_is_loaded(settings, tensors, words, folder, monkeypatch):
    packed = {} if tensors is None else tensors
    copied = Scheme(settings, lambda weight: ({end: each.clone() for end, each in packed.items()}, weight))
    quantise(folder, copied if packed else SCHEMES["fp8, blocks"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    with pytest.raises(InputError, match=words):
        load(folder)


def test_float8_numbers_without_a_word_of_their_scales_are_refused(folder):
    config = (folder / "config.json").read_text()
    quantise(folder, SCHEMES["fp8, blocks"])
    (folder / "config.json").write_text(config)
    with pytest.raises(InputError, match="names no quantisation"):
        load(folder)


def test_a_draft_is_for_the_quantised_files_and_starts_from_ordinary_blocks(folder, tiny_run, tmp_path, tiny_tokenizer):
    meant = quantise(folder, SCHEMES["fp8, blocks"])
    target = load(folder)
    assert target.identity.weights_sha256 == hash_weights(folder)
    draft = initial_draft(StudentConfig(init="target_layers", layers=[0]), target)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(draft.get_parameter(name), meant[name].float())
    save_draft_lm(tmp_path / "artifact", draft, tiny_tokenizer, metadata_of_draft_lm(target.identity.to_dict()))
    assert "quantization_config" not in json.loads((tmp_path / "artifact" / "config.json").read_text())
    twin = load(tiny_run / "target")
    with pytest.raises(InputError, match="target weights"):
        load_draft(tmp_path / "artifact", twin.identity, twin.model)


def test_a_tensor_of_several_names_and_one_that_is_not_contiguous_are_written_whole(tmp_path):
    matrix = torch.arange(12.0).view(3, 4)
    write_weights(tmp_path / "model.safetensors", {"a": matrix, "b": matrix, "c": matrix.T})
    there = load_file(tmp_path / "model.safetensors")
    assert torch.equal(there["a"], matrix)
    assert torch.equal(there["b"], matrix)
    assert torch.equal(there["c"], matrix.T)

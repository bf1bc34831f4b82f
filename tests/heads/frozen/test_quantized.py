"""A quantised target is run with the weights that its numbers stand for, and its identity is that of the quantised files."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from configs.runtime.errors import InputError
from configs.schema.learning import StudentConfig
from configs.schema.target import TargetConfig
from distill.student.init import initial_draft
from heads.artifact import load_draft, save_draft_lm
from heads.frozen.identity import hash_weights
from heads.frozen.loading import load_target
from heads.frozen.quantized import read_float_weights
from tests.support.decoding import metadata_of_draft_lm
from tests.support.quantized_checkpoints import (
    Scheme,
    awq,
    bitsandbytes_int8,
    bitsandbytes_nf4,
    fp8_blocks,
    fp8_whole,
    gptq,
    int8_rows,
    mxfp4,
    pack_quantized,
    quantise,
)

PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
FLOATS = PACKED | {"format": "float-quantized"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
SCHEMES = {
    "fp8, blocks": Scheme({"quant_method": "fp8", "weight_block_size": [16, 16]}, fp8_blocks(".weight_scale_inv", 16)),
    "fp8, blocks cut off": Scheme({"quant_method": "fp8", "weight_block_size": [24, 24]}, fp8_blocks(".weight_scale_inv", 24)),
    "fp8, scales as exponents": Scheme(
        {"quant_method": "fp8", "weight_block_size": [16, 16]}, fp8_blocks(".weight_scale_inv", 16, as_exponents=True)
    ),
    "fp8, one scale": Scheme({"quant_method": "fp8", "weight_block_size": None}, fp8_whole(".weight_scale_inv", by_row=False)),
    "fbgemm": Scheme({"quant_method": "fbgemm_fp8"}, fp8_whole(".weight_scale", by_row=True)),
    "modelopt": Scheme({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_whole(".weight_scale", by_row=False)),
    "compressed-tensors, fp8": Scheme(FLOATS, fp8_whole(".weight_scale", by_row=True, scale_dtype=torch.bfloat16)),
    "compressed-tensors, fp8 blocks": Scheme(
        FLOATS | {"config_groups": {"group_0": {"weights": {"block_structure": [24, 24]}}}}, fp8_blocks(".weight_scale", 24)
    ),
    "compressed-tensors, int8": Scheme(PACKED | {"format": "int-quantized"}, int8_rows),
    "compressed-tensors, int4": Scheme(PACKED, pack_quantized(zero_points=False)),
    "compressed-tensors, int4 with zero points": Scheme(PACKED, pack_quantized(zero_points=True)),
    "compressed-tensors, int8 by activation order": Scheme(PACKED, pack_quantized(bits=8, zero_points=True, shuffled=True)),
    "gptq": Scheme(GPTQ, gptq(4)),
    "gptq by activation order": Scheme(GPTQ, gptq(4, shuffled=True)),
    "gptq, 8 bits, second version": Scheme(GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, gptq(8, v2=True)),
    "awq": Scheme({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, awq),
    "bitsandbytes, nf4": Scheme({"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes_nf4),
    "bitsandbytes, int8": Scheme({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes_int8),
}


@pytest.fixture
def folder(tmp_path, tiny_run):
    """A model folder to be quantised."""
    return shutil.copytree(tiny_run / "target", tmp_path / "quantised")


def load(path, dtype="float32"):
    return load_target(TargetConfig(name=str(path), dtype=dtype, device="cpu"))


def assert_runs_with(target, meant, exact=True):
    """Every weight is the one that is meant, and the logits are those of a float64 model with these weights."""
    own = dict(target.model.named_parameters())
    for name, weight in meant.items():
        if name in own:
            wanted = weight.to(own[name].dtype)
            assert torch.equal(own[name], wanted) if exact else torch.allclose(own[name], wanted, rtol=2**-21, atol=0), name
    config = copy.deepcopy(target.model.config)
    config._experts_implementation = "eager"  # the others know no float64
    reference = type(target.model)(config).double().eval()
    reference.load_state_dict({name: parameter.double() for name, parameter in own.items()}, strict=False)
    for name, weight in meant.items():
        if name in own:
            reference.get_parameter(name).data = weight
    ids_BT = torch.arange(3, 17)[None]
    logits_BTV, wanted_BTV = target.model(ids_BT).logits, reference(ids_BT).logits
    assert torch.allclose(logits_BTV.double(), wanted_BTV, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_run_with_the_weights_that_its_numbers_stand_for(name, folder):
    meant = quantise(folder, SCHEMES[name])
    target = load(folder)
    assert_runs_with(target, meant, exact=name != "bitsandbytes, int8")  # which has two roundings
    projection, states_BC = target.model.model.layers[0].mlp.up_proj, torch.randn(3, 32)
    product_BR = torch.einsum("bc,rc->br", states_BC.double(), meant["model.layers.0.mlp.up_proj.weight"])
    assert torch.allclose(projection(states_BC).double(), product_BR, rtol=1e-5, atol=1e-5)
    assert not hasattr(target.model.config, "quantization_config")


def test_the_experts_of_an_fp8_model_are_found_one_by_one_and_stacked(tmp_path, tiny_tokenizer):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    experts = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **experts))
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


def test_experts_stacked_in_one_fp8_tensor_have_blocks_of_their_own(folder):
    weight = torch.randn(3, 40, 50)
    tensors, meant = fp8_blocks("_scale_inv", 24)(weight)
    stored = load_file(folder / "model.safetensors") | {f"experts.down_proj{end}": part for end, part in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    settings = SCHEMES["fp8, blocks cut off"].settings
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    assert torch.equal(read_float_weights(folder)["experts.down_proj"].load(), meant.float())


def test_the_experts_of_gpt_oss_are_mxfp4(tmp_path, tiny_tokenizer):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    experts = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = GptOssConfig(
        **sizes,
        **experts,
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


def test_a_spread_target_keeps_its_dequantised_blocks_in_the_offload_folder(folder, tmp_path):
    quantise(folder, SCHEMES["awq"])
    settings = {"name": str(folder), "dtype": "float32", "device": "cpu", "device_map": {"model.layers.1": "disk"}}
    spread = load_target(TargetConfig.model_validate(settings | {"offload_folder": str(tmp_path / "offloaded")}))
    ids_BT = torch.arange(3, 17)[None]
    assert torch.equal(spread.model(ids_BT).logits, load(folder).model(ids_BT).logits)
    with pytest.raises(InputError, match=r"target\.offload_folder"):
        load_target(TargetConfig.model_validate(settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "aqlm"}, "quantised by aqlm, which cannot be dequantised; known are fp8"),
        (PACKED | {"format": "nvfp4-pack-quantized"}, "by compressed-tensors in the form nvfp4-pack-quantized"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "in the form sparse-24-bitmask"),
        (GPTQ | {"checkpoint_format": "marlin"}, "by gptq in the form marlin"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "by modelopt in the form nvfp4"),
        (GPTQ, r"_proj\.qzeros, torch\.int32 \[\d, 3\], does not fit .* 2, 4, 8 bits"),
    ],
)
def test_what_cannot_be_dequantised_is_refused_by_name_before_anything_is_loaded(settings, words, folder, monkeypatch):
    quantise(folder, Scheme(settings, _three_bits if settings is GPTQ else gptq(4)))
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    with pytest.raises(InputError, match=words):
        load(folder)


def _three_bits(weight):
    tensors, meant = gptq(4)(weight)
    return tensors | {".qzeros": torch.zeros(len(tensors[".scales"]), 3, dtype=torch.int32)}, meant


def test_float8_numbers_without_a_word_of_their_scales_are_refused(folder):
    quantise(folder, SCHEMES["fp8, blocks"])
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"float8_e4m3fn numbers, and its config.json names no quantisation"):
        load(folder)


def test_a_scheme_that_leaves_weights_of_the_model_out_is_refused(folder):
    quantise(folder, SCHEMES["awq"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = PACKED  # whose tensors have other names
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"no values for model\.layers\.0\.mlp\.down_proj\.weight, .* of LlamaForCausalLM"):
        load(folder)


def test_a_draft_is_for_the_quantised_files_and_starts_from_ordinary_blocks(folder, tiny_run, tmp_path, tiny_tokenizer):
    meant = quantise(folder, SCHEMES["fp8, blocks"])
    target = load(folder)
    assert target.identity.weights_sha256 == hash_weights(folder) != hash_weights(tiny_run / "target")
    draft = initial_draft(StudentConfig(init="target_layers", layers=[0]), target)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(draft.get_parameter(name), meant[name].float())
    save_draft_lm(tmp_path / "artifact", draft, tiny_tokenizer, metadata_of_draft_lm(target.identity.to_dict()))
    assert "quantization_config" not in json.loads((tmp_path / "artifact" / "config.json").read_text())
    assert load_draft(tmp_path / "artifact", load(folder).identity, target.model).warnings == []
    twin = load(tiny_run / "target")
    with pytest.raises(InputError, match=r"what differs from .* at hand: target weights"):
        load_draft(tmp_path / "artifact", twin.identity, twin.model)
    assert load_draft(tmp_path / "artifact", twin.identity, twin.model, allow_target_mismatch=True).warnings


def test_a_quantised_model_is_a_draft_as_it_was_found(folder, tiny_run):
    meant = quantise(folder, SCHEMES["compressed-tensors, int4"])
    target = load(tiny_run / "target")
    draft = load_draft(folder, target.identity, target.model)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(draft.proposer.model.get_parameter(name), meant[name].float())

"""A checkpoint's own MTP modules come in as a draft under every naming; what has no place is named."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from configs.runtime.errors import InputError
from configs.schema.heads import MtpSettings
from heads.artifact import WEIGHTS_FILE
from heads.formats.exporting.exporter import export
from heads.formats.importing.importer import fit
from heads.formats.importing.reading import read_external
from tests.heads.families import test_mtp_checkpoint as native
from tests.support import family_checks as checks


def write_checkpoint(folder, model, naming, *, modules=1, shards=1):
    """Write a target with MTP modules; return their tensors as a head names them."""
    theirs, ours = {}, {}
    for number in range(modules):
        more, named = native.module_tensors(naming, model, number, torch.float32)
        theirs, ours = theirs | more, ours | named
    native.write_checkpoint(folder, model, theirs, shards=shards)
    return ours


def loaded(fitted):
    return {name: stored.load() for name, stored in fitted.weights.items()}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("naming", native.SPELLINGS)
def test_a_module_of_a_checkpoint_is_a_draft(tmp_path, naming, shards):
    model = checks.tiny_target("qwen3")
    ours = write_checkpoint(tmp_path / "target", model, naming, shards=shards)
    external = read_external(tmp_path / "target", reads="pre_norm")
    fitted = fit(external, model)
    assert fitted.settings.shared_depths
    assert fitted.taps == (checks.SMALL["num_hidden_layers"],)  # the state before the final norm
    found = loaded(fitted)
    assert found.keys() == ours.keys()
    assert all(torch.equal(found[name], ours[name]) for name in ours)
    assert all(stored.shape == tuple(ours[name].shape) for name, stored in fitted.weights.items())


@pytest.mark.parametrize(("naming", "reads"), [("mimo", "pre_norm"), ("deepseek", "post_norm"), ("qwen3_next", "post_norm")])
def test_a_checkpoint_is_taken_to_read_what_its_family_does(tmp_path, naming, reads):
    model = checks.tiny_target("qwen3")
    write_checkpoint(tmp_path / "target", model, naming)
    assert fit(read_external(tmp_path / "target"), model).settings.reads == reads
    assert fit(read_external(tmp_path / "target", reads="post_norm"), model).settings.reads == "post_norm"


def test_modules_alone_in_mimos_layout_are_taken_for_an_export(write):
    written = write(MtpSettings(kind="mtp", num_depths=2))
    export(written.source(), "vllm", written.out)
    assert fit(read_external(written.out), written.model).settings.reads == "post_norm"


def test_several_modules_are_one_for_each_depth(tmp_path):
    model = checks.tiny_target("qwen3")
    ours = write_checkpoint(tmp_path / "target", model, "deepseek", modules=2)
    external = read_external(tmp_path / "target")
    fitted = fit(external, model)
    assert (fitted.settings.shared_depths, fitted.settings.num_depths, external.num_speculative_tokens) == (False, 2, 2)
    assert all(torch.equal(value, ours[name]) for name, value in loaded(fitted).items())


def test_experts_kept_one_by_one_are_stacked(tmp_path):
    torch.manual_seed(2)
    config = Glm4MoeConfig(
        **checks.GROUPED,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        pad_token_id=None,
    )
    model = Glm4MoeForCausalLM(config).eval()
    block = model.model.layers[-1].state_dict()
    N, width = config.num_hidden_layers, config.hidden_size
    theirs = {f"model.layers.{N}.{name}.weight": torch.randn(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    theirs[f"model.layers.{N}.eh_proj.weight"] = torch.randn(width, 2 * width)
    for name, value in block.items():
        stem = f"model.layers.{N}.{name}"
        if name == "mlp.experts.down_proj":
            theirs |= {f"model.layers.{N}.mlp.experts.{e}.down_proj.weight": value[e].clone() for e in range(4)}
        elif name == "mlp.experts.gate_up_proj":
            for e in range(4):
                for half, part in zip(value[e].chunk(2), ("gate_proj", "up_proj"), strict=True):
                    theirs[f"model.layers.{N}.mlp.experts.{e}.{part}.weight"] = half.clone()
        else:
            theirs[stem] = value.clone()
    native.write_checkpoint(tmp_path / "target", model, theirs)
    found = loaded(fit(read_external(tmp_path / "target"), model))
    for name, value in block.items():
        assert torch.equal(found[f"layers.0.mtp_block.{name}"], value)


def test_a_module_with_biases_for_a_block_without_is_refused(tmp_path):
    model = checks.tiny_target("llama")
    write_checkpoint(tmp_path / "target", model, "mimo")
    tensors = load_file(tmp_path / "target" / WEIGHTS_FILE)
    name = "model.mtp_layers.0.self_attn.q_proj.bias"
    save_file(tensors | {name: torch.zeros(32)}, tmp_path / "target" / WEIGHTS_FILE, metadata={"format": "pt"})
    fit(read_external(tmp_path / "target"), model)
    save_file(tensors | {name: torch.ones(32)}, tmp_path / "target" / WEIGHTS_FILE, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"has no place in the head for {name}"):
        fit(read_external(tmp_path / "target"), model)


def test_modules_of_no_known_naming_are_refused(tmp_path):
    model = checks.tiny_target("llama")
    native.write_checkpoint(tmp_path / "target", model, {"mtp.something.weight": torch.ones(2)})
    with pytest.raises(InputError, match=r"holds no MTP weights that draftsmith knows .* found: mtp.something.weight"):
        read_external(tmp_path / "target")

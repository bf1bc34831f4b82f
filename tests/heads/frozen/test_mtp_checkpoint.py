"""A checkpoint's own MTP weights: read under every known naming, put back, and refused in words."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Glm4MoeForCausalLM

from configs.runtime.errors import InputError
from configs.schema.heads import MtpSettings
from heads.families.registry import FAMILIES
from heads.frozen.mtp_checkpoint import NativeMtp
from heads.frozen.weights import SINGLE_FILE
from tests.support import family_checks as checks
from tests.support.mtp_checkpoints import (
    BLOCKS,
    SPELLINGS,
    write_checkpoint,
    write_experts,
    write_modules,
)

ONE = MtpSettings(kind="mtp", init="checkpoint")


@pytest.fixture
def checkpoint(tmp_path):
    """A function that writes a tiny target with MTP tensors; gives it loaded, and the tensors as a head names them."""

    def make(naming, **options):
        ours = write_modules(tmp_path / "target", checks.tiny_target("qwen3"), naming, **options)
        target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
        return target.eval().requires_grad_(False), ours

    return make


def started(settings, target):
    """Return a head as training starts it."""
    head = FAMILIES["mtp"].build(settings, target, None).float()
    FAMILIES["mtp"].start(head, target)
    return head


def layers_of(head):
    return {name: value for name, value in head.state_dict().items() if name.startswith("layers.")}


def stitch(folder, tensors, out):
    """Write a copy of a checkpoint with these modules in it."""
    out.mkdir()
    native = NativeMtp(folder)
    native.stitch_into(out, tensors, native.places(tensors))


@pytest.mark.parametrize("naming", SPELLINGS)
def test_a_head_starts_from_the_checkpoints_own_module(checkpoint, naming):
    target, ours = checkpoint(naming, shards=3)
    layers = layers_of(started(ONE, target))
    assert set(layers) == set(ours)
    assert all(torch.equal(layers[name], value) for name, value in ours.items())


def test_a_module_that_was_not_trained_leaves_every_byte_as_it_was(tmp_path, checkpoint):
    target, _ = checkpoint("mimo", dtype=torch.float32)
    folder, out = tmp_path / "target", tmp_path / "stitched"
    head = started(ONE, target).bfloat16()  # as an artifact for a bfloat16 target holds it
    stitch(folder, layers_of(head), out)
    assert all(path.read_bytes() == (out / path.name).read_bytes() for path in folder.iterdir())


def test_experts_kept_one_by_one_are_stacked_and_put_back(tmp_path):
    folder, out = tmp_path / "target", tmp_path / "stitched"
    model = write_experts(folder)
    target = Glm4MoeForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in target.model.layers[1].parameters():
            parameter.zero_()  # so that what the head has can only come from the file
    head = started(ONE, target)
    for name, value in model.model.layers[1].state_dict().items():
        assert torch.equal(head.layers[0].mtp_block.state_dict()[name], value), name
    with torch.no_grad():
        head.layers[0].mtp_block.mlp.experts.gate_up_proj[3, 12:] += 1.0
    stitch(folder, layers_of(head), out)
    before, after = load_file(folder / SINGLE_FILE), load_file(out / SINGLE_FILE)
    changed = [key for key, value in before.items() if not torch.equal(value, after[key])]
    assert changed == ["model.layers.2.mlp.experts.3.up_proj.weight"]
    torch.testing.assert_close(after[changed[0]], before[changed[0]] + 1.0)


# --- refusals -----------------------------------------------------------------------------------------------------


def test_modules_for_each_of_several_depths_are_refused(tmp_path):
    write_modules(tmp_path / "target", checks.tiny_target("qwen3"), "deepseek", modules=2)
    with pytest.raises(InputError, match="an MTP module for each of several depths"):
        NativeMtp(tmp_path / "target")


def test_a_checkpoint_without_a_module_of_a_known_naming_is_refused(tmp_path):
    write_checkpoint(tmp_path / "target", checks.tiny_target("llama"), {"nextn.0.mixer.weight": torch.zeros(2)})
    with pytest.raises(InputError, match="holds no MTP weights that draftsmith knows"):
        NativeMtp(tmp_path / "target")


@pytest.mark.parametrize(
    ("naming", "name", "value", "words"),
    [
        ("mimo", "model.mtp_layers.0.mlp.up_proj.weight", None, "that of MiMo, but it lacks {name}"),
        ("qwen3_next", "mtp.layers.0.self_attn.q_proj.weight_scale_inv", torch.zeros(1), "has no place in the head for {name}"),
        ("deepseek", f"model.layers.{BLOCKS}.hnorm.weight", torch.zeros(7), r"{name} has shape \[7\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, naming, name, value, words):
    ours = write_modules(tmp_path / "target", checks.tiny_target("llama"), naming, changes={name: value})
    with pytest.raises(InputError, match=words.format(name=name)):
        NativeMtp(tmp_path / "target").read(ours)

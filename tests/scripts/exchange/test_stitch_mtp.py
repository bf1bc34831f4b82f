"""`scripts/exchange/stitch_mtp.py`: a head trained from a checkpoint's own MTP weights goes back there, and only there."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.runtime.command import BAD_INPUT, DONE, run_command
from configs.schema.heads import MtpSettings
from configs.schema.target import TargetConfig
from configs.schema.training import StitchConfig
from heads.artifact import METADATA_FILE
from heads.families.registry import FAMILIES
from heads.frozen.loading import load_target
from scripts.exchange.stitch_mtp import add_arguments, main
from tests.support.artifacts import save_artifact

NAMES = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight", "fc.weight")


@pytest.fixture
def folder(tmp_path, tiny_llama, tiny_tokenizer):
    """A folder with `target/`, a checkpoint with an MTP module, and `artifact/`, a head that started from it and moved."""
    tiny_llama(dtype=torch.float32).save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    last = "model.layers.1."
    block = {f"mtp.layers.0.{key.removeprefix(last)}": value for key, value in tensors.items() if key.startswith(last)}
    shapes = ([32], [32], [32], [32, 64])
    extra = block | {f"mtp.{name}": torch.ones(shape) for name, shape in zip(NAMES, shapes, strict=True)}
    save_file({key: value.clone() for key, value in (tensors | extra).items()}, tmp_path / "target" / "model.safetensors")
    target = load_target(TargetConfig(name=str(tmp_path / "target"), dtype="float32", device="cpu"))
    settings = MtpSettings(kind="mtp", init="checkpoint")
    head = FAMILIES["mtp"].build(settings, target.model, None)
    FAMILIES["mtp"].start(head, target.model)
    with torch.no_grad():
        head.layers[0].enorm.weight.add_(1.0)
    save_artifact(tmp_path / "artifact", head, target.identity.to_dict())
    return tmp_path


def run(folder, *more):
    argv = [str(folder / "artifact"), "--target", str(folder / "target"), "--out", str(folder / "out"), *more]
    return run_command(StitchConfig, main, description="", argv=argv, add_arguments=add_arguments)


def test_the_trained_tensors_stand_in_a_copy_of_the_target(folder):
    assert run(folder) == DONE
    before, after = (load_file(folder / name / "model.safetensors") for name in ("target", "out"))
    assert [key for key in before if not torch.equal(before[key], after[key])] == ["mtp.pre_fc_norm_embedding.weight"]
    assert torch.equal(after["mtp.pre_fc_norm_embedding.weight"], torch.full([32], 2.0))
    record = json.loads((folder / "out" / "run.json").read_text())
    assert record["artifact"] == str(folder / "artifact")
    load_target(TargetConfig(name=str(folder / "out"), dtype="float32", device="cpu"))


def test_another_targets_folder_is_refused_and_can_be_allowed(folder, capsys):
    path = folder / "target" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] += 1.0
    save_file(tensors, path)
    assert run(folder) == BAD_INPUT
    assert "are others (--set allow_target_mismatch=true stitches nevertheless)" in capsys.readouterr().err
    assert not (folder / "out").exists()
    assert run(folder, "--set", "allow_target_mismatch=true") == DONE


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "eagle3"}, "holds a draft of kind 'eagle3'; only mtp can be stitched"),
        ({"head": {"kind": "mtp", "train_head": True}}, "has an output head of its own"),
        ({"head": {"kind": "mtp", "nosuch": 1}}, "is damaged"),
    ],
)
def test_what_has_no_place_in_the_checkpoint_is_refused(folder, capsys, values, words):
    path = folder / "artifact" / METADATA_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    assert run(folder) == BAD_INPUT
    assert words in capsys.readouterr().err
    assert not (folder / "out").exists()

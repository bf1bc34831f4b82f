"""Checkpoints: what is not whole or another run's is passed over by name, and nothing is read that may run code."""

import json
import logging
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR

from configs.runtime.errors import InputError
from configs.runtime.files import sha256_of
from configs.runtime.run_record import training_fingerprint
from train.loop.checkpoints import MANIFEST, Checkpoints, Progress, list_checkpoints, read_manifest
from train.loop.lineage import Lineage


def lineage(**changes):
    return Lineage(**{"config_sha256": "a" * 64, "engine": "whole", "num_processes": 1, "micro_batches_per_step": 2} | changes)


@pytest.fixture
def made(tmp_path):
    """A function that gives the checkpoints of a run of a linear layer, and the layer."""

    def make(keep=2, **changes):
        module = torch.nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(module.parameters())
        accelerator = Accelerator(cpu=True)
        module, prepared = accelerator.prepare(module, optimizer)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
        checkpoints = Checkpoints(
            folder=tmp_path / "checkpoints",
            accelerator=accelerator,
            scheduler=scheduler,
            lineage=lineage(**changes),
            keep=keep,
            progress=Progress(),
        )
        return checkpoints, module, prepared

    return make


def steps(checkpoints, module, optimizer, count, best_step=None):
    """Take steps and write a checkpoint after each; return the weights after each."""
    weights = []
    for _ in range(count):
        module(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        checkpoints.scheduler.step()
        checkpoints.progress.step += 1
        checkpoints.progress.best_step = best_step
        checkpoints.save()
        weights.append(module.weight.detach().clone())
    return weights


def names(checkpoints):
    return [path.name for path in list_checkpoints(checkpoints.folder)]


def test_weights_schedule_and_place_come_back(made):
    written, *others = made()
    weights = steps(written, *others, 3)
    again, module, _ = made()
    assert again.resume() == written.folder / "step-00000003"
    assert torch.equal(module.weight, weights[-1])
    assert again.progress == written.progress
    assert again.scheduler.state_dict() == written.scheduler.state_dict()


def test_the_newest_and_the_best_are_kept_and_nothing_else_is_left(made):
    checkpoints, *others = made(keep=2)
    steps(checkpoints, *others, 5, best_step=2)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-00000002", "step-00000004", "step-00000005"]


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "progress.json", MANIFEST])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(made, caplog, name, damage):
    written, *others = made()
    weights = steps(written, *others, 2)
    damage(written.folder / "step-00000002" / name)
    again, module, _ = made()
    with caplog.at_level(logging.WARNING, logger="draftsmith"):
        assert again.resume() == written.folder / "step-00000001"
    assert "step-00000002 is damaged: " in caplog.text
    assert torch.equal(module.weight, weights[0])
    damage(written.folder / "step-00000001" / name)
    with pytest.raises(InputError, match=r"step-00000002 is damaged: .* none before it .* schedule\.resume=false"):
        made()[0].resume()


def test_a_checkpoint_of_another_run_is_passed_over(made, caplog):
    own, *others = made()
    steps(own, *others, 1)
    strange, *others = made(config_sha256="b" * 64)
    strange.progress.step = 1
    steps(strange, *others, 1)
    again, *_ = made()
    with caplog.at_level(logging.WARNING, logger="draftsmith"):
        assert again.resume() == own.folder / "step-00000001"
    assert "step-00000002 belongs to a run with another config or other data; passed over" in caplog.text


@pytest.mark.parametrize(
    ("then", "objection"),
    [
        ({"num_processes": 2}, None),
        ({"engine": "FSDP"}, r"held sharded by FSDP, and this run holds them replicated in every process"),
        ({"micro_batches_per_step": 4}, r"steps of 4 micro-batches over 1 processes, this run has steps of 2 over 1: choose"),
    ],
)
def test_another_world_is_taken_where_its_steps_are_the_same(made, caplog, then, objection):
    written, *others = made(**then)
    steps(written, *others, 1)
    if objection is None:
        with caplog.at_level(logging.WARNING, logger="draftsmith"):
            assert made()[0].resume() is not None
        assert "was written by 2 processes, this run has 1" in caplog.text
        return
    with pytest.raises(InputError, match=objection):
        made()[0].resume()


def test_what_an_engine_split_is_not_taken_by_other_numbers_of_processes():
    here = lineage(engine="FSDP", num_processes=2)
    assert here.objection(lineage(engine="FSDP", num_processes=4)) == "was sharded over 4 processes by FSDP, and this run has 2"
    assert here.objection(lineage(engine="FSDP", num_processes=2)) is None


def test_data_of_the_same_name_and_other_content_is_another_run():
    config = {"data": {"train": "train.jsonl"}, "output": "a", "schedule": {"seed": 1, "keep_checkpoints": 1}}
    quiet = {"data": {"train": "train.jsonl"}, "output": "b", "schedule": {"seed": 1, "keep_checkpoints": 2}}
    assert training_fingerprint(config, {"train": "1"}) == training_fingerprint(quiet, {"train": "1"})
    assert training_fingerprint(config, {"train": "1"}) != training_fingerprint(config, {"train": "2"})


def test_an_option_that_is_off_leaves_the_run_what_it_was_and_one_that_is_on_does_not():
    config = {"head": {"layers": [1, {"kind": "a"}]}, "schedule": {"seed": 1}}
    off = {"head": {"layers": [1, {"kind": "a", "new": None}], "new": None}, "schedule": {"seed": 1}}
    on = {"head": {"layers": [1, {"kind": "a", "new": 0}]}, "schedule": {"seed": 1}}
    assert training_fingerprint(config, {}) == training_fingerprint(off, {}) != training_fingerprint(on, {})


class Trap:
    """Runs code when a pickle of it is read."""

    def __reduce__(self):
        return Path.touch, (Path("sprung"),)


@pytest.mark.parametrize("name", ["custom_checkpoint_0.pkl", "optimizer.bin", "random_states_0.pkl"])
def test_a_pickle_in_a_checkpoint_from_elsewhere_runs_nothing(made, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    written, *others = made()
    steps(written, *others, 1)
    (path,) = list_checkpoints(written.folder)
    torch.save(Trap(), path / name)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["sha256"][name] = sha256_of(path / name)
    (path / MANIFEST).write_text(json.dumps(manifest))
    assert made()[0]._objection(path) is None  # its checksums are right
    with pytest.raises(InputError, match="cannot be read"):
        made()[0].resume()
    assert not Path("sprung").exists()
    pickle.loads(pickle.dumps(Trap()))
    assert Path("sprung").exists()  # the trap works


def test_a_manifest_cannot_name_files_outside_its_checkpoint(made):
    written, *others = made()
    steps(written, *others, 1)
    (path,) = list_checkpoints(written.folder)
    manifest = json.loads((path / MANIFEST).read_text())
    for name in ("../../secret", "/etc/passwd", "link"):
        if name == "link":
            (path / name).symlink_to("/etc/passwd")
        (path / MANIFEST).write_text(json.dumps(manifest | {"sha256": {**manifest["sha256"], name: "0" * 64}}))
        with pytest.raises(InputError, match="which leads out of it"):
            made()[0].resume()


def test_what_a_killed_write_left_is_cleared_and_what_only_lacked_its_name_is_taken(made):
    written, *others = made()
    steps(written, *others, 2)
    half = written.folder / ".step-00000003.partial"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    shutil.copytree(written.folder / "step-00000002", written.folder / ".step-00000001.dropped")
    (written.folder / "step-00000002").replace(written.folder / ".step-00000002.partial")
    again, *_ = made()
    assert again.resume() == written.folder / "step-00000002"
    assert sorted(path.name for path in written.folder.iterdir()) == ["step-00000001", "step-00000002"]
    assert read_manifest(written.folder / "step-00000002").step == 2

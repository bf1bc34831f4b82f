"""Checkpoints: what is not whole or another run's is passed over by name, and nothing is read that may run code."""

import json
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


class Run:
    """A linear layer, its optimiser, and their checkpoints."""

    def __init__(self, folder, keep=2, **changes):
        self.module = torch.nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(self.module.parameters())
        accelerator = Accelerator(cpu=True)
        self.module, self.optimizer = accelerator.prepare(self.module, optimizer)
        self.checkpoints = Checkpoints(
            folder=folder,
            accelerator=accelerator,
            scheduler=LambdaLR(optimizer, lambda step: 1 / (step + 1)),
            lineage=lineage(**changes),
            keep=keep,
            progress=Progress(),
        )

    def take(self, count, best_step=None):
        """Take steps and write a checkpoint after each; return the weights after each."""
        weights = []
        for _ in range(count):
            self.module(torch.ones(2, 3)).square().sum().backward()
            self.optimizer.step()
            self.checkpoints.scheduler.step()
            self.checkpoints.progress.step += 1
            self.checkpoints.progress.best_step = best_step
            self.checkpoints.save()
            weights.append(self.module.weight.detach().clone())
        return weights


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def test_the_newest_and_the_best_are_kept_and_weights_schedule_and_place_come_back(folder):
    run = Run(folder, keep=2)
    weights = run.take(5, best_step=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000004", "step-00000005"]
    again = Run(folder)
    assert again.checkpoints.resume() == folder / "step-00000005"
    assert torch.equal(again.module.weight, weights[-1])
    assert again.checkpoints.progress == run.checkpoints.progress
    assert again.checkpoints.scheduler.state_dict() == run.checkpoints.scheduler.state_dict()


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "progress.json", MANIFEST])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(folder, caplog, name, damage):
    weights = Run(folder).take(2)
    damage(folder / "step-00000002" / name)
    again = Run(folder)
    assert again.checkpoints.resume() == folder / "step-00000001"
    assert "step-00000002 is damaged: " in caplog.text
    assert torch.equal(again.module.weight, weights[0])
    damage(folder / "step-00000001" / name)
    with pytest.raises(InputError, match=r"step-00000002 is damaged: .* none before it .* schedule\.resume=false"):
        again.checkpoints.resume()


def test_a_checkpoint_of_another_run_is_passed_over(folder, caplog):
    Run(folder).take(1)
    strange = Run(folder, config_sha256="b" * 64)
    strange.checkpoints.progress.step = 1
    strange.take(1)
    assert Run(folder).checkpoints.resume() == folder / "step-00000001"
    assert "step-00000002 belongs to a run with another config or other data; passed over" in caplog.text


@pytest.mark.parametrize(
    ("then", "objection"),
    [
        ({"num_processes": 2}, None),
        ({"engine": "FSDP"}, r"held sharded by FSDP, and this run holds them replicated in every process"),
        ({"micro_batches_per_step": 4}, r"steps of 4 micro-batches over 1 processes, this run has steps of 2 over 1: choose"),
    ],
)
def test_another_world_is_taken_where_its_steps_are_the_same(folder, caplog, then, objection):
    Run(folder, **then).take(1)
    if objection is None:
        assert Run(folder).checkpoints.resume() is not None
        assert "was written by 2 processes, this run has 1" in caplog.text
        return
    with pytest.raises(InputError, match=objection):
        Run(folder).checkpoints.resume()


def test_what_an_engine_split_is_not_taken_by_other_numbers_of_processes():
    here = lineage(engine="FSDP", num_processes=2)
    assert here.objection(lineage(engine="FSDP", num_processes=4)) == "was sharded over 4 processes by FSDP, and this run has 2"
    assert here.objection(lineage(engine="FSDP", num_processes=2)) is None


def test_other_data_of_the_same_name_or_an_option_that_is_on_make_another_run():
    config = {"output": "a", "schedule": {"seed": 1, "keep_checkpoints": 1}, "layers": [{"kind": "a"}]}
    quiet = {"output": "b", "schedule": {"seed": 1, "keep_checkpoints": 2}, "layers": [{"kind": "a", "new": None}], "new": None}
    other = config | {"layers": [{"kind": "a", "new": 0}]}
    own = training_fingerprint(config, {"train": "1"})
    assert training_fingerprint(quiet, {"train": "1"}) == own
    assert own not in (training_fingerprint(config, {"train": "2"}), training_fingerprint(other, {"train": "1"}))


class Trap:
    """Runs code when a pickle of it is read."""

    def __reduce__(self):
        return Path.touch, (Path("sprung"),)


@pytest.mark.parametrize("name", ["custom_checkpoint_0.pkl", "optimizer.bin", "random_states_0.pkl"])
def test_a_pickle_in_a_checkpoint_from_elsewhere_runs_nothing(folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Run(folder).take(1)
    (path,) = list_checkpoints(folder)
    torch.save(Trap(), path / name)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["sha256"][name] = sha256_of(path / name)
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="cannot be read"):  # its checksums are right
        Run(folder).checkpoints.resume()
    assert not Path("sprung").exists()
    pickle.loads(pickle.dumps(Trap()))
    assert Path("sprung").exists()  # the trap works


def test_a_manifest_cannot_name_files_outside_its_checkpoint(folder):
    Run(folder).take(1)
    (path,) = list_checkpoints(folder)
    manifest = json.loads((path / MANIFEST).read_text())
    for name in ("../../secret", "/etc/passwd", "link"):
        if name == "link":
            (path / name).symlink_to("/etc/passwd")
        (path / MANIFEST).write_text(json.dumps(manifest | {"sha256": {**manifest["sha256"], name: "0" * 64}}))
        with pytest.raises(InputError, match="which leads out of it"):
            Run(folder).checkpoints.resume()


def test_what_a_killed_write_left_is_cleared_and_what_only_lacked_its_name_is_taken(folder):
    Run(folder).take(2)
    half = folder / ".step-00000003.partial"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    shutil.copytree(folder / "step-00000002", folder / ".step-00000001.dropped")
    (folder / "step-00000002").replace(folder / ".step-00000002.partial")
    assert Run(folder).checkpoints.resume() == folder / "step-00000002"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]
    assert read_manifest(folder / "step-00000002").step == 2

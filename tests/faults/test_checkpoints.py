"""Checkpoints: what is not whole or another run's is passed over by name, and nothing is read that may run code."""

import errno
import json
import os
import pickle
import shutil
import threading
import time
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR

from configs.runtime.errors import InputError
from configs.runtime.files import sha256_of
from configs.schema.training import DistillConfig, HeadsConfig
from tests.heads.formats.test_damaged import Trap
from train.loop import checkpoints
from train.loop.checkpoints import MANIFEST, Checkpoints, Progress, list_checkpoints, read_manifest
from train.loop.lineage import CHANGES_NO_WEIGHT, Lineage, changes_no_weight, deciding_settings


def lineage(**changes):
    usual = {"config_sha256": "a" * 64, "engine": "whole", "num_processes": 1, "micro_batches_per_step": 2, "settings": {}}
    return Lineage(**usual | changes)


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
            module=self.module,
            optimizer=self.optimizer,
            scheduler=LambdaLR(optimizer, lambda step: 1 / (step + 1)),
            lineage=lineage(**changes),
            keep=keep,
            progress=Progress(),
        )

    def take(self, count, best_step=None, *, save=True, wait=True):
        """Take steps and write a checkpoint after each; return the weights after each."""
        weights = []
        for _ in range(count):
            self.module(torch.ones(2, 3)).square().sum().backward()
            self.optimizer.step()
            self.checkpoints.scheduler.step()
            self.checkpoints.progress.step += 1
            self.checkpoints.progress.best_step = best_step
            if save:
                self.checkpoints.save(wait=wait)
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


@pytest.fixture
def held(monkeypatch):
    """An event without which no model or optimiser is written."""
    event, write = threading.Event(), checkpoints.write_state

    def write_later(*args, **settings):
        assert event.wait(10)
        write(*args, **settings)

    monkeypatch.setattr(checkpoints, "write_state", write_later)
    yield event
    event.set()


def test_training_goes_on_while_a_checkpoint_of_the_state_before_is_written(folder, held):
    run = Run(folder)
    [weights] = run.take(1, wait=False)
    run.take(1, save=False)
    assert not torch.equal(run.module.weight, weights)
    assert list_checkpoints(folder) == []  # a crash now would leave what was there before
    held.set()
    run.checkpoints.finish()
    again = Run(folder)
    assert again.checkpoints.resume() == folder / "step-00000001"
    assert torch.equal(again.module.weight, weights)
    assert again.checkpoints.progress.step == 1
    assert again.checkpoints.scheduler.last_epoch == 1
    assert again.optimizer.state_dict()["state"][0]["step"] == 1


def test_a_disk_that_fills_behind_the_run_is_told_before_the_next_and_the_checkpoint_before_stands(folder, monkeypatch):
    run = Run(folder)
    run.take(1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(checkpoints, "write_state", lambda *args, **settings: (_ for _ in ()).throw(full))
    with pytest.raises(InputError, match=r"cannot write .*step-00000002: .*No space left"):  # noqa: PT012
        run.take(1, wait=False)
        while True:
            run.checkpoints.check()
            time.sleep(0.01)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001"]


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"), [("model.safetensors", flip), ("optimizer.bin", cut), ("progress.json", Path.unlink), (MANIFEST, cut)]
)
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


@pytest.mark.parametrize(
    ("then", "objection"),
    [
        ({"num_processes": 2}, None),
        ({"engine": "FSDP"}, r"held sharded by FSDP, and this run holds them replicated in every process"),
        ({"micro_batches_per_step": 4}, r"schedule\.gradient_accumulation_steps"),
    ],
)
def test_another_world_is_taken_where_its_steps_are_the_same(folder, caplog, then, objection):
    here = lineage(engine="FSDP", num_processes=2)
    assert here.objection(lineage(engine="FSDP", num_processes=4)) == "was sharded over 4 processes by FSDP, and this run has 2"
    Run(folder, **then).take(1)
    if objection is None:
        assert Run(folder).checkpoints.resume() is not None
        assert "was written by 2 processes, this run has 1" in caplog.text
        return
    with pytest.raises(InputError, match=objection):
        Run(folder).checkpoints.resume()


def leaves(config, above=""):
    for name, value in config.items():
        yield from leaves(value, f"{above}{name}.") if isinstance(value, dict) and value else [(above + name, value)]


def changed(config, key, value="another"):
    first, _, rest = key.partition(".")
    return config | {first: changed(config[first], rest, value) if rest else value}


@pytest.mark.parametrize("schema", [DistillConfig, HeadsConfig])
def test_every_key_of_a_training_decides_its_weights_or_is_listed_with_the_reason_why_not(schema):
    config = schema().model_dump(mode="json")
    for part in ("images", "audio"):
        config["target"][part] = {"max_bytes": 1, "folder": "a"}
    own = deciding_settings(config, {})
    found = {key: deciding_settings(changed(config, key), {}) == own for key, _ in leaves(config)}
    assert {key for key, same in found.items() if same} == {key for key in found if changes_no_weight(key)}
    deciding = ("optimizer.learning_rate", "data.max_length", "held_out.num_prompts", "schedule.seed", "loss.temperature")
    assert not any(found[key] for key in deciding)
    assert deciding_settings(config, {"train": "1"}) != own
    assert deciding_settings(config | {"new": None}, {}) == own
    known = [key for each in (DistillConfig, HeadsConfig) for key, _ in leaves(each().model_dump())]
    sections = {".".join(key.split(".")[:end]) for key in known for end in range(1, key.count(".") + 2)}
    named = {key for key in CHANGES_NO_WEIGHT if not key.startswith(("target.images.", "target.audio."))}
    assert named <= sections


@pytest.mark.parametrize(
    ("key", "then", "now", "refused"),
    [
        ("loss.chunk_size", 128, 2048, False),
        ("data.train", "a/train.jsonl", "b/train.jsonl", False),
        ("schedule.max_steps", 4, 5, True),
        ("optimizer.learning_rate", 1e-3, 2e-3, True),
    ],
)
def test_what_changes_no_weight_never_refuses_a_resume(folder, key, then, now, refused):
    def of(value):
        settings = deciding_settings(changed(DistillConfig().model_dump(mode="json"), key, value), {})
        return {"config_sha256": sha256(json.dumps(settings).encode()).hexdigest(), "settings": settings}

    Run(folder, **of(then)).take(1)
    if not refused:
        assert Run(folder, **of(now)).checkpoints.resume() is not None
        return
    with pytest.raises(InputError, match=rf"{key} {then} -> {now}"):
        Run(folder, **of(now)).checkpoints.resume()


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

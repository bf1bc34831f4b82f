"""Nothing that comes from elsewhere runs: no code beside a model, no pickle; and no link in a cache leads out of it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from configs.runtime.errors import InputError
from configs.schema.learning import StudentConfig
from configs.schema.target import TargetConfig
from distill.cache.format import read_manifest
from distill.cache.reader import TargetCache
from distill.student.init import initial_draft
from heads.artifact import load_draft
from heads.target.loading import load_target

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path("sprung").touch()
class Own(LlamaForCausalLM): pass
class OwnConfig(LlamaConfig): model_type = "own"
"""


class Trap:
    """Runs code when a pickle of it is read."""

    def __reduce__(self):
        return Path.touch, (Path("sprung"),)


def bring_code(folder: Path) -> None:
    (folder / "own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))


def bring_pickle(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights | {"trap": Trap()}, folder / "pytorch_model.bin")


@pytest.fixture
def strange(tmp_path, tiny_run, monkeypatch):
    """A copy of a target and of an artifact made for it, to be tampered with; "sprung" would appear beside them."""
    monkeypatch.chdir(tmp_path)
    for name in ("target", "artifact"):
        shutil.copytree(tiny_run / name, tmp_path / name)
    yield tmp_path
    assert not Path("sprung").exists()


@pytest.fixture(scope="module")
def target(tiny_run):
    return load_target(TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"))


LOADERS = {
    "artifact": ("artifact", lambda folder, target: load_draft(folder, target.identity, target.model), "is damaged"),
    "first model": (
        "target",
        lambda folder, target: initial_draft(StudentConfig(init="model", path=str(folder), layers=None), target),
        r"student\.path: .* does not hold a causal LM",
    ),
    "target": ("target", lambda folder, _: load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu")), "."),
}


@pytest.mark.parametrize("tamper", [bring_code, bring_pickle])
@pytest.mark.parametrize(("name", "load", "complaint"), LOADERS.values(), ids=LOADERS)
def test_what_brings_code_or_pickles_is_refused(strange, target, tamper, name, load, complaint):
    tamper(strange / name)
    with pytest.raises(InputError, match=complaint):
        load(strange / name, target)


def test_a_shard_that_is_a_link_to_elsewhere_is_refused(undisturbed, tmp_path):
    shutil.copytree(undisturbed["cache"], tmp_path / "cache")
    shard = tmp_path / "cache" / "shard-00000.safetensors"
    shard.replace(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    cache = TargetCache(tmp_path / "cache", read_manifest(tmp_path / "cache"), torch.float32)
    with pytest.raises(InputError, match=r"expected the name of a file in .*shard-00000\.safetensors', which leads out of it"):
        cache.rows([0], [1])

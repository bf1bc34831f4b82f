"""Nothing that comes from elsewhere runs: no code beside a model, no pickle; and no link in a cache leads out of it."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.runtime.errors import InputError
from configs.schema.target import TargetConfig
from configs.schema.training import StudentConfig
from distill.cache.format import read_manifest, read_places
from distill.cache.reader import TargetCache
from distill.cache.storage import Folder
from distill.student.init import initial_draft
from heads.artifact import load_draft
from heads.families.registry import FAMILIES
from heads.formats.exporting.source import TargetFolder, read_source
from heads.formats.importing.importer import fit
from heads.formats.importing.reading import read_external
from heads.frozen.loading import load_target
from tests.support.artifacts import save_artifact

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
    folder = Folder(tmp_path / "cache")
    manifest = read_manifest(folder)
    cache = TargetCache(folder, manifest, read_places(folder, manifest), torch.float32)
    with pytest.raises(InputError, match=r"expected the name of a file in .*shard-00000\.safetensors', which leads out of it"):
        cache.rows([0], [1])


# --- configs that call for more than their weights ----------------------------------------------------------------


@pytest.fixture
def little_memory():
    """What is done meanwhile must not take 300 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


def rewrite(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1e12},
        {"num_hidden_layers": 250},
        {"vocab_size": 10**9},
        {"hidden_size": 2**20, "head_dim": 16},
        {"pad_token_id": 10**9},
        {"layer_types": ["full_attention"] * 1000},
        {"note": " " * 11_000_000},
    ],
)
def test_a_draft_lm_larger_than_its_weights_is_not_built(strange, target, little_memory, changes):
    rewrite(strange / "artifact" / "config.json", **changes)
    with pytest.raises(InputError):
        load_draft(strange / "artifact", target.identity, target.model)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("settings", "changes", "complaint"),
    [
        ({"kind": "medusa", "num_depths": 2}, {"num_layers": 10**7}, "while the weights beside it hold 4 tensors"),
        ({"kind": "medusa", "num_depths": 2}, {"num_depths": 250, "num_layers": 250}, "more weights than|while the weights"),
        ({"kind": "eagle3", "taps": [0, 1, 2]}, {"layer": {"mlp_width": 10**9}}, "its settings call for more weights than"),
        ({"kind": "dflash", "taps": [1], "mask_token_id": 3}, {"block_size": 10**9}, "drafted in one forward; .* at most 256"),
    ],
)
def test_a_head_larger_than_its_weights_is_not_built(tmp_path, target, little_memory, settings, changes, complaint):
    family = FAMILIES[settings["kind"]]
    head = family.build(family.settings.model_validate(settings), target.model, None)
    save_artifact(tmp_path / "head", head, target.identity.to_dict())
    known = json.loads((tmp_path / "head" / "draftsmith.json").read_text())["head"]
    rewrite(tmp_path / "head" / "draftsmith.json", head=known | changes)
    with pytest.raises(InputError, match=complaint):
        load_draft(tmp_path / "head", target.identity, target.model)
    if changes.get("num_layers", 0) > 256:
        with pytest.raises(InputError, match=complaint):
            read_source(tmp_path / "head", TargetFolder(tmp_path, "none"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("depths", "layers"), [(10**7, 1), (250, 250)])
def test_a_draft_of_another_program_larger_than_its_weights_is_not_built(tmp_path, target, little_memory, depths, layers):
    width = target.model.config.hidden_size
    save_file({"blocks.0.layers.0.weight": torch.zeros(width, width)}, tmp_path / "model.safetensors")
    config = {"model_type": "medusa", "medusa_num_heads": depths, "medusa_num_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"while the weights|more weights than"):
        fit(read_external(tmp_path), target.model)

"""Folders that hold no usable draft are refused, whatever is wrong with them; nothing in them is run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from configs.runtime.errors import InputError
from configs.schema.target import TargetConfig
from configs.schema.training import StudentConfig
from distill.student.init import initial_draft
from heads.artifact import load_draft
from heads.formats.importing.importer import fit
from heads.formats.importing.reading import read_external
from heads.frozen.loading import load_target
from heads.frozen.weights import INDEX_FILE
from heads.metadata import METADATA_FILE, VOCABULARY_FILE, WEIGHTS_FILE
from heads.vocabulary import DraftVocabulary

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path("sprung").touch()
class Own(LlamaForCausalLM): pass
class OwnConfig(LlamaConfig): model_type = "own"
"""


@pytest.fixture(scope="module")
def target(tiny_run):
    return load_target(TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"))


@pytest.fixture
def strange(tmp_path, tiny_run, monkeypatch):
    """A copy of a target and of an artifact made for it, to be tampered with; "sprung" would appear beside them."""
    monkeypatch.chdir(tmp_path)
    for name in ("target", "artifact"):
        shutil.copytree(tiny_run / name, tmp_path / name)
    yield tmp_path
    assert not Path("sprung").exists()


def rewrite(path, **changes):
    """Change keys of a JSON file; None drops one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


# --- nothing that comes from elsewhere runs -----------------------------------------------------------------------


class Trap:
    """Runs code when a pickle of it is read."""

    def __reduce__(self):
        return Path.touch, (Path("sprung"),)


def bring_code(folder):
    (folder / "own.py").write_text(CODE)
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    rewrite(folder / "config.json", model_type="own", auto_map=auto)


def bring_pickle(folder):
    weights = load_file(folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).unlink()
    torch.save(weights | {"trap": Trap()}, folder / "pytorch_model.bin")


def bring_other_values(folder):
    bring_pickle(folder)
    torch.save({"fc.weight": {"nested": torch.ones(2)}}, folder / "pytorch_model.bin")


def bring_adapter(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    model.save_pretrained(folder)  # the adapter alone


LOADERS = {
    "artifact": lambda folder, target: load_draft(folder, target.identity, target.model),
    "first model": lambda folder, target: initial_draft(StudentConfig(init="model", path=str(folder), layers=None), target),
    "target": lambda folder, _: load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu")),
    "import": lambda folder, target: fit(read_external(folder), target.model),
}


TAMPERED = {
    bring_code: "config.json",
    bring_pickle: "pytorch_model.bin",
    bring_other_values: "pytorch_model.bin",
    bring_adapter: "adapter_config.json",
}


@pytest.mark.parametrize("tamper", TAMPERED)
@pytest.mark.parametrize("name", LOADERS)
def test_what_brings_code_pickles_or_an_adapter_is_refused_by_its_file(strange, target, tamper, name):
    folder = strange / ("artifact" if name == "artifact" else "target")
    tamper(folder)
    with pytest.raises(InputError, match=None if name == "import" else TAMPERED[tamper]):
        LOADERS[name](folder, target)


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "sub/model.safetensors", "absent.safetensors"])
def test_an_index_whose_paths_leave_the_folder(exported, file):
    path = exported.out / WEIGHTS_FILE
    (exported.out.parent / "other.safetensors").write_bytes(path.read_bytes())
    (exported.out / "sub").mkdir()
    path.rename(exported.out / "sub" / WEIGHTS_FILE)
    (exported.out / INDEX_FILE).write_text(json.dumps({"weight_map": {"fc.weight": file}}))
    with pytest.raises(InputError, match=INDEX_FILE):
        fit(read_external(exported.out), exported.model)


# --- tensors and configs that are not a head's --------------------------------------------------------------------

FAULTS = {"norm.weight": None, "one.weight": torch.ones(2), "two.weight": torch.ones(2), "fc.weight": torch.ones(3, 3)}
TOLD = r"lacks norm.weight; holds unknown one.weight, two.weight; holds fc.weight of shape \[3, 3\] where \[32, 96\]"


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (FAULTS, TOLD),
        ({"fc.weight": torch.ones(32, 96).bool()}, "fc.weight"),
        ({"fc.weight": torch.ones(32, 96).to(torch.float8_e4m3fn)}, "fc.weight"),
        ({"embed_tokens.weight": torch.ones(64, 31)}, "embed_tokens.weight"),
        ({"lm_head.weight": torch.ones(32, 32, dtype=torch.int32)}, "lm_head.weight"),
        ({"d2t": torch.arange(1, 64, 2)}, "d2t"),
        ({"d2t": torch.arange(32)}, "t2d"),
        ({"d2t": torch.zeros(32, dtype=torch.int64) - torch.arange(32)}, "d2t"),
        ({"d2t": torch.zeros(4, 8, dtype=torch.int64)}, "d2t"),
    ],
)
def test_wrong_tensors_are_named_all_together(exported, tensors, named):
    path = exported.out / WEIGHTS_FILE
    save_file({name: value for name, value in (load_file(path) | tensors).items() if value is not None}, path)
    with pytest.raises(InputError, match=named):
        fit(read_external(exported.out), exported.model)


MIXED = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}


@pytest.mark.parametrize(
    ("changes", "layer", "named"),
    [
        ({"speculators_model_type": "mlp"}, {}, "speculators_model_type"),
        ({"transformer_layer_config": [1]}, {}, "transformer_layer_config"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, {}, "fc.weight"),
        ({"speculators_config": {"proposal_methods": []}}, {}, r"config\.json"),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": "3"}]}}, {}, "speculative_tokens"),
        ({"architectures": ["Something"], "speculators_model_type": None}, {}, "Something"),
        ({}, {"hidden_size": 16}, "16 wide"),
        ({}, {"hidden_act": "gelu"}, "gelu"),
        ({}, MIXED, "full_attention and sliding_attention"),
    ],
)
def test_wrong_configs_and_other_layers_than_ours_are_refused(exported, changes, layer, named):
    path = exported.out / "config.json"
    rewrite(path, **{"transformer_layer_config": json.loads(path.read_text())["transformer_layer_config"] | layer} | changes)
    with pytest.raises(InputError, match=named):
        fit(read_external(exported.out), exported.model)


# --- damaged artifacts --------------------------------------------------------------------------------------------

REDUCED = {"draft_vocabulary": "reduced", "draft_vocab_size": 5}


@pytest.mark.parametrize(
    ("metadata", "vocabulary", "named"),
    [
        ({"format_version": 2}, None, "format_version"),
        ({"kind": "crystal_ball"}, None, "crystal_ball"),
        ({"surprise": 1}, None, "surprise"),
        ({"num_speculative_tokens": 0}, None, "num_speculative_tokens"),
        ({"target": {}}, None, "name"),
        ({"draft_vocab_size": 99}, None, "says 99"),  # tokens, of which its model has fewer
        (REDUCED, [1, 5, 8, 30], VOCABULARY_FILE),
        (REDUCED, [1, 5, 8, 30, 70], "token 70"),
    ],
)
def test_wrong_metadata_and_a_vocabulary_that_does_not_fit_are_named(strange, target, metadata, vocabulary, named):
    folder = strange / "artifact"
    rewrite(folder / METADATA_FILE, **metadata)
    if vocabulary is not None:
        DraftVocabulary(token_ids_W=torch.tensor(vocabulary), target_vocab_size=80).write(folder / VOCABULARY_FILE)
    with pytest.raises(InputError, match=named):
        load_draft(folder, target.identity, target.model)


@pytest.mark.parametrize("name", [METADATA_FILE, "tokenizer*", "*.safetensors", "cut off"])
def test_a_folder_that_lacks_a_file_or_a_byte_is_no_draft(strange, target, name):
    folder = strange / ("target" if name in ("tokenizer*", "*.safetensors") else "artifact")
    for path in folder.glob(name):
        path.unlink()
    if name == METADATA_FILE:
        (folder / "config.json").unlink()  # else it is a model as it was found
    if name == "cut off":
        (folder / WEIGHTS_FILE).write_bytes((folder / WEIGHTS_FILE).read_bytes()[:-1])
    with pytest.raises(InputError):
        load_draft(folder, target.identity, target.model)

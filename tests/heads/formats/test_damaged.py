"""Folders that hold no usable draft are refused in words, whatever is wrong with them, and nothing in them is run."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.runtime.errors import InputError
from configs.schema.heads import Eagle3Settings
from heads.artifact import WEIGHTS_FILE
from heads.formats.exporting.exporter import export
from heads.formats.importing.importer import fit
from heads.formats.importing.reading import read_external
from heads.target.checkpoint_files import INDEX_FILE
from tests.support import family_checks as checks

EAGLE = Eagle3Settings(kind="eagle3", taps=[1, 2, 3], num_depths=3)


@pytest.fixture
def exported(write):
    """An EAGLE-3 head with a reduced vocabulary in the form of speculators."""
    written = write(EAGLE, vocabulary=checks.SOME_TOKENS)
    export(written.source(), "speculators", written.out)
    return written


def change(exported, **values):
    path = exported.out / WEIGHTS_FILE
    save_file({name: value for name, value in (load_file(path) | values).items() if value is not None}, path)


def refused(exported, words):
    with pytest.raises(InputError, match=words):
        fit(read_external(exported.out), exported.model)


def test_several_faults_are_told_together(exported):
    change(
        exported,
        **{"norm.weight": None, "one.weight": torch.ones(2), "two.weight": torch.ones(2), "fc.weight": torch.ones(3, 3)},
    )
    words = r"lacks norm.weight; holds unknown one.weight, two.weight; holds fc.weight of shape \[3, 3\] where \[32, 96\]"
    refused(exported, words)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool])
def test_whole_numbers_for_weights(exported, dtype):
    change(exported, **{"fc.weight": torch.ones(32, 96, dtype=dtype)})
    refused(exported, "expected floating numbers, and fc.weight hold others")


def test_an_unknown_kind_of_number(exported):
    change(exported, **{"fc.weight": torch.ones(32, 96).to(torch.float8_e4m3fn)})
    refused(exported, "holds numbers of type F8_E4M3; known are")


@pytest.mark.parametrize("d2t", [torch.zeros(32), torch.zeros(32, dtype=torch.bool), torch.zeros(4, 8, dtype=torch.int64)])
def test_offsets_that_are_none(exported, d2t):
    change(exported, d2t=d2t)
    refused(exported, "d2t: expected a list of whole numbers")


@pytest.mark.parametrize("left", [0, 4, 100, -1])
def test_a_file_that_ends_early(exported, left):
    path = exported.out / WEIGHTS_FILE
    content = path.read_bytes()
    path.write_bytes(content[:left])
    refused(exported, "cannot be read")


def test_a_pickle_that_would_run_something(exported, tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    (exported.out / WEIGHTS_FILE).unlink()
    torch.save({"fc.weight": Trap()}, exported.out / "pytorch_model.bin")
    refused(exported, "pytorch_model.bin is no file of torch's with tensors only")
    assert not (tmp_path / "sprung").exists()


def test_a_pickle_of_something_else_than_tensors(exported):
    (exported.out / WEIGHTS_FILE).unlink()
    torch.save({"state_dict": {"fc.weight": torch.ones(2)}}, exported.out / "pytorch_model.bin")
    refused(exported, "holds something else than tensors by name")


def test_a_pickle_of_no_known_name(exported):
    (exported.out / WEIGHTS_FILE).rename(exported.out / "training_state.pt")
    refused(exported, "holds none of model.safetensors")


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "sub/model.safetensors", "absent.safetensors", ".."])
def test_an_index_whose_paths_leave_the_folder(exported, file):
    path = exported.out / WEIGHTS_FILE
    (exported.out.parent / "other.safetensors").write_bytes(path.read_bytes())
    (exported.out / "sub").mkdir()
    path.rename(exported.out / "sub" / WEIGHTS_FILE)
    (exported.out / INDEX_FILE).write_text(json.dumps({"weight_map": {"fc.weight": file}}))
    refused(exported, "names files that are not in the folder")


@pytest.mark.parametrize("content", ["", "[]", "{", '"text"'])
def test_a_config_that_is_none(exported, content):
    (exported.out / "config.json").write_text(content)
    refused(exported, "is not JSON|holds no object")


@pytest.mark.parametrize("key", ["speculators_config", "transformer_layer_config"])
def test_a_config_without_a_key_of_its_form(exported, key):
    path = exported.out / "config.json"
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != key}))
    refused(exported, f"lacks or garbles a key of its format: KeyError\\('{key}'\\)")

"""Folders that hold no usable draft are refused in words, whatever is wrong with them, and nothing in them is run."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.runtime.errors import InputError
from heads.formats.importing.importer import fit
from heads.formats.importing.reading import read_external
from heads.frozen.checkpoint_files import INDEX_FILE
from heads.metadata import WEIGHTS_FILE


def refused(exported, words):
    with pytest.raises(InputError, match=words):
        fit(read_external(exported.out), exported.model)


FAULTS = {"norm.weight": None, "one.weight": torch.ones(2), "two.weight": torch.ones(2), "fc.weight": torch.ones(3, 3)}
TOLD = r"lacks norm.weight; holds unknown one.weight, two.weight; holds fc.weight of shape \[3, 3\] where \[32, 96\]"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (FAULTS, TOLD),
        ({"fc.weight": torch.ones(32, 96).bool()}, "expected floating numbers, and fc.weight hold others"),
        ({"fc.weight": torch.ones(32, 96).to(torch.float8_e4m3fn)}, "holds numbers of type F8_E4M3; known are"),
        ({"embed_tokens.weight": torch.ones(64, 31)}, r"embed_tokens.weight of shape \[64, 31\] where \[64, 32\] is expected"),
        ({"lm_head.weight": torch.ones(32, 32, dtype=torch.int32)}, "expected floating numbers, and lm_head.weight"),
        ({"d2t": torch.arange(1, 64, 2)}, "outside the target's vocabulary"),
        ({"d2t": torch.arange(32)}, "t2d marks other tokens"),
        ({"d2t": torch.zeros(32, dtype=torch.int64) - torch.arange(32)}, "must rise"),
        ({"d2t": torch.zeros(4, 8, dtype=torch.int64)}, "d2t: expected a list of whole numbers"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_wrong_tensors_are_named_all_together(exported, tensors, words):
    path = exported.out / WEIGHTS_FILE
    save_file({name: value for name, value in (load_file(path) | tensors).items() if value is not None}, path)
    refused(exported, words)


MIXED = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}


@pytest.mark.parametrize(
    ("changes", "layer", "words"),
    [
        ({"speculators_model_type": "mlp"}, {}, "'mlp' is none of eagle3, peagle, dflash, dspark, dflash2, xpress, mtp"),
        ({"transformer_layer_config": [1]}, {}, "expected transformer_layer_config to be a section"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, {}, r"fc.weight of shape \[32, 96\] where \[32, 64\] is expected"),
        ({"speculators_config": {"proposal_methods": []}}, {}, "lacks or garbles a key of its format: IndexError"),
        (
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": "3"}]}},
            {},
            "expected speculative_tokens to be a number of at least 1, got '3'",
        ),
        ({"architectures": ["Something"], "speculators_model_type": None}, {}, "in no form that draftsmith reads"),
        ({}, {"hidden_size": 16}, "are 16 wide and the target's states 32"),
        ({}, {"hidden_act": "gelu"}, "the activation gelu"),
        ({}, MIXED, "layers of full_attention and sliding_attention"),
    ],
)
def test_wrong_configs_and_other_layers_than_ours_are_refused(exported, changes, layer, words):
    path = exported.out / "config.json"
    config = json.loads(path.read_text())
    config["transformer_layer_config"] |= layer
    path.write_text(json.dumps({key: value for key, value in (config | changes).items() if value is not None}))
    refused(exported, words)


def test_a_file_that_ends_early(exported):
    path = exported.out / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-1])
    refused(exported, "cannot be read")


@pytest.mark.parametrize(
    ("inside", "words"), [("trap", "is no file of torch's with tensors only"), ("nested", "holds something else than tensors")]
)
def test_a_pickle_of_something_else_than_tensors(exported, tmp_path, inside, words):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    (exported.out / WEIGHTS_FILE).unlink()
    torch.save({"fc.weight": Trap() if inside == "trap" else {"fc.weight": torch.ones(2)}}, exported.out / "pytorch_model.bin")
    refused(exported, words)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "sub/model.safetensors", "absent.safetensors", ".."])
def test_an_index_whose_paths_leave_the_folder(exported, file):
    path = exported.out / WEIGHTS_FILE
    (exported.out.parent / "other.safetensors").write_bytes(path.read_bytes())
    (exported.out / "sub").mkdir()
    path.rename(exported.out / "sub" / WEIGHTS_FILE)
    (exported.out / INDEX_FILE).write_text(json.dumps({"weight_map": {"fc.weight": file}}))
    refused(exported, "names files that are not in the folder")

"""The tensors of a checkpoint's files, as safetensors and torch write them."""

import pytest
import torch
from safetensors.torch import load_file

from heads.frozen.checkpoint_files import read_weights, write_weights

VALUES = {
    "ids": torch.arange(7),
    "flags": torch.tensor([True, False, True]),
    "matrix": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "scalar": torch.tensor(2.5),
}


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_both_kinds_of_files_are_read(tmp_path, file):
    (torch.save if file.endswith("bin") else lambda values, path: write_weights(path, values))(VALUES, tmp_path / file)
    there = read_weights(tmp_path)
    assert there.keys() == VALUES.keys()
    assert all(torch.equal(there[name], value) for name, value in VALUES.items())


def test_a_tensor_of_several_names_and_one_that_is_not_contiguous_are_written_whole(tmp_path):
    matrix = torch.arange(12.0).view(3, 4)
    write_weights(tmp_path / "model.safetensors", {"a": matrix, "b": matrix, "c": matrix.T})
    there = load_file(tmp_path / "model.safetensors")
    assert torch.equal(there["a"], matrix)
    assert torch.equal(there["b"], matrix)
    assert torch.equal(there["c"], matrix.T)

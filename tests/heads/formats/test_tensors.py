"""Weights go from file to file one at a time, and come out as safetensors reads them."""

import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.errors import InputError
from heads.formats.tensors import Stored, constant, read_weights, write_weights

VALUES = {
    "ids": torch.arange(7),
    "flags": torch.tensor([True, False, True]),
    "matrix": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "scalar": torch.tensor(2.5),
}


def test_safetensors_reads_what_is_written(tmp_path):
    write_weights(tmp_path / "model.safetensors", {name: constant(value) for name, value in VALUES.items()})
    there = load_file(tmp_path / "model.safetensors")
    assert there.keys() == VALUES.keys()
    assert all(torch.equal(there[name], value) and there[name].dtype == value.dtype for name, value in VALUES.items())


@pytest.mark.parametrize("file", ["model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"])
def test_every_kind_of_file_is_read(tmp_path, file):
    (save_file if file.endswith("safetensors") else torch.save)(VALUES, tmp_path / file)
    there = read_weights(tmp_path)
    assert there.keys() == VALUES.keys()
    assert all(torch.equal(there[name].load(), value) for name, value in VALUES.items())
    assert all(there[name].shape == tuple(value.shape) for name, value in VALUES.items())


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds none of"):
        read_weights(tmp_path)


def test_memory_is_taken_for_one_tensor_at_a_time(tmp_path):
    held = []

    def load():
        held.append(sum(1 for each in alive if each() is not None))
        value = torch.ones(64, 64)
        alive.append(weakref.ref(value))
        return value

    alive = []
    stored = Stored(shape=(64, 64), dtype=torch.float32, load=load)
    write_weights(tmp_path / "model.safetensors", {str(number): stored for number in range(6)})
    assert max(held) <= 1  # the one before may live until its name is bound anew


def test_swapped_halves_and_rows():
    matrix = constant(torch.arange(8.0).reshape(2, 4))
    assert matrix.halves_swapped().load().tolist() == [[2, 3, 0, 1], [6, 7, 4, 5]]
    assert matrix.rows(torch.tensor([1])).load().tolist() == [[4, 5, 6, 7]]

"""Weights go from file to file one at a time, and come out as safetensors reads them."""

import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.frozen.checkpoint_files import LazyTensor, constant, read_weights, write_weights

VALUES = {
    "ids": torch.arange(7),
    "flags": torch.tensor([True, False, True]),
    "matrix": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "scalar": torch.tensor(2.5),
}


@pytest.mark.parametrize("file", ["model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"])
def test_every_kind_of_file_is_read(tmp_path, file):
    if file == "model.safetensors":
        write_weights(tmp_path / file, {name: constant(value) for name, value in VALUES.items()})
        assert all(torch.equal(each, VALUES[name]) for name, each in load_file(tmp_path / file).items())
    else:
        (save_file if file.endswith("safetensors") else torch.save)(VALUES, tmp_path / file)
    there = read_weights(tmp_path)
    assert there.keys() == VALUES.keys()
    assert all(torch.equal(there[name].load(), value) for name, value in VALUES.items())
    assert all((each.shape, each.dtype) == (tuple(VALUES[name].shape), VALUES[name].dtype) for name, each in there.items())


def test_memory_is_taken_for_one_tensor_at_a_time(tmp_path):
    held = []

    def load():
        held.append(sum(1 for each in alive if each() is not None))
        value = torch.ones(64, 64)
        alive.append(weakref.ref(value))
        return value

    alive = []
    stored = LazyTensor(shape=(64, 64), dtype=torch.float32, load=load)
    write_weights(tmp_path / "model.safetensors", {str(number): stored for number in range(6)})
    assert max(held) <= 1  # the one before may live until its name is bound anew


@pytest.mark.parametrize("sign", [1, -1])
def test_a_head_that_is_spread_has_the_same_likeliest_token(sign):
    generator = torch.Generator().manual_seed(3)
    common_D = torch.full((8,), 5.0)
    rows_WD = torch.randn(6, 8, generator=generator) + common_D
    ids_W = torch.tensor([1, 2, 5, 11, 17, 30])
    states_ND = torch.randn(100, 8, generator=generator) + sign * common_D  # all logits positive, or all negative
    whole_VD = constant(rows_WD).full_vocabulary_head(ids_W, 32).load()
    logits_NV, own_NW = states_ND @ whole_VD.T, states_ND @ rows_WD.T
    assert bool((sign * own_NW > 0).all())
    torch.testing.assert_close(logits_NV[:, ids_W], own_NW)
    assert torch.equal(logits_NV.argmax(1), ids_W[own_NW.argmax(1)])
    others_NV = logits_NV[:, [v for v in range(32) if v not in ids_W.tolist()]]
    torch.testing.assert_close(others_NV, own_NW.mean(1, keepdim=True).expand_as(others_NV), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [torch.zeros(3, 2), torch.zeros(4, 2).half()])
def test_a_tensor_that_is_not_what_was_declared_is_not_written(tmp_path, value):
    stored = LazyTensor(shape=(4, 2), dtype=torch.float32, load=lambda: value)
    with pytest.raises(RuntimeError, match=r"declared as torch\.float32 \(4, 2\), got"):
        write_weights(tmp_path / "model.safetensors", {"a": stored})

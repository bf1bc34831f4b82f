"""The memory floor counts each weight that a token reads once, and sets a forward's time beside it."""

import pytest
import torch

from scripts.bench.decode import benchmark as memory_floor


def test_a_tied_matrix_is_read_as_output_and_an_embedding_of_its_own_is_not(tiny_llama):
    tied = tiny_llama(tie_word_embeddings=True, dtype=torch.float32)
    untied = tiny_llama(dtype=torch.float32)
    assert memory_floor.weight_bytes(tied) == memory_floor.weight_bytes(untied)
    assert memory_floor.weight_bytes(tied) == 4 * sum(parameter.numel() for parameter in tied.parameters())


def test_a_forward_that_takes_twice_the_floors_time_reaches_half_its_speed(tiny_llama, monkeypatch):
    model = tiny_llama(dtype=torch.float32)
    monkeypatch.setattr(memory_floor, "read_bandwidth", lambda device: 1e9)
    least = memory_floor.weight_bytes(model) / 1e9
    shares = memory_floor.floor_shares(model, {"transformers": 4 * least, "lean": 2 * least})
    assert shares["gigabytes_per_second"] == 1.0
    assert shares["share_lean"] == pytest.approx(0.5)
    assert shares["share_transformers"] == pytest.approx(0.25)


def test_the_bandwidth_is_a_number_of_bytes_a_second(monkeypatch):
    monkeypatch.setattr(memory_floor, "READ_BYTES", 2**22)
    assert 1e6 < memory_floor.read_bandwidth(torch.device("cpu")) < 1e14

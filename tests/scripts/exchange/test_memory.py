"""Exports and imports stream tensors: what they hold is bounded by the largest one, not by the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from heads.target import checkpoint_files as tensors

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "exchange" / "memory.py"
VOCAB_SIZE = 24_576  # two tensors of 48 MiB in the head, two in the target


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is reset by Linux only")
def test_the_peak_is_below_one_tensor_and_a_fifth(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--vocab-size", str(VOCAB_SIZE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert [step["step"] for step in steps] == ["export", "export in bfloat16", "import"]
    for step in steps:
        assert 0 < step["peak_mib"] <= step["allowed_mib"]
    assert steps[0]["allowed_mib"] == pytest.approx(1.2 * 48, abs=0.1)


def test_a_tensor_is_read_in_blocks_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 100)
    value = torch.randn(10, 6)
    tensors.write_weights(tmp_path / "model.safetensors", {"a": tensors.constant(value)})
    stored = tensors.read_weights(tmp_path)["a"]
    assert [len(block) for block in stored.in_blocks()] == [4, 4, 2]
    assert torch.equal(torch.cat(list(stored.in_blocks())), value)
    assert torch.equal(torch.cat(list(stored.cast(torch.bfloat16).in_blocks())), value.bfloat16())
    for derived in (stored.halves_swapped(), stored.rows(torch.tensor([3, 1])), stored.reshaped((6, 10))):
        assert torch.equal(torch.cat(list(derived.in_blocks())), derived.load())  # what changes the rows is read whole
        assert derived.load().shape == derived.shape


def test_blocks_that_are_not_what_was_said_are_no_file(tmp_path):
    short = tensors.Stored(shape=(4, 2), dtype=torch.float32, load=lambda: torch.zeros(3, 2))
    with pytest.raises(RuntimeError, match="was to take 32 bytes, got 24"):
        tensors.write_weights(tmp_path / "model.safetensors", {"a": short})
    other = tensors.Stored(shape=(4, 2), dtype=torch.float32, load=lambda: torch.zeros(4, 2).half())
    with pytest.raises(RuntimeError, match=r"was to be torch\.float32"):
        tensors.write_weights(tmp_path / "model.safetensors", {"a": other})

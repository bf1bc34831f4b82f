"""Exports and imports stream tensors: what they hold is bounded by the largest one, not by the model."""

import json
import sys

import pytest

from configs.runtime.command import DONE
from scripts.lab.bench.exchange_memory import measure_exchange
from scripts.lab.fault_injection.children import Child
from scripts.lab.settings import ExchangeMemoryConfig

VOCAB_SIZE = 24_576  # two tensors of 48 MiB in the head, two in the target


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is reset by Linux only")
def test_the_peak_is_below_one_tensor_and_a_fifth(tmp_path, capfd):
    child = Child(measure_exchange, ExchangeMemoryConfig(vocab_size=VOCAB_SIZE), tmp_path)
    assert child.end() == DONE, child.said
    steps = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert [step["step"] for step in steps] == ["export", "export in bfloat16", "import"]
    for step in steps:
        assert 0 < step["peak_mib"] <= step["allowed_mib"]
    assert steps[0]["allowed_mib"] == pytest.approx(1.2 * 48, abs=0.1)

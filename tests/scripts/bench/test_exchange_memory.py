"""Exports and imports stream tensors: what they hold is bounded by the largest one, not by the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
VOCAB_SIZE = 24_576  # two tensors of 48 MiB in the head, two in the target


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is reset by Linux only")
def test_the_peak_is_below_one_tensor_and_a_fifth(tmp_path):
    command = [sys.executable, "scripts/benchmark.py", "memory", "--set", f"vocab_size={VOCAB_SIZE}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [step["step"] for step in steps] == ["export", "export in bfloat16", "import"]
    for step in steps:
        assert 0 < step["peak_mib"] <= step["allowed_mib"]
    assert steps[0]["allowed_mib"] == pytest.approx(1.2 * 48, abs=0.1)

"""`make gpu-check` on the mock device, whose tokens, losses and artifacts are the CPU's."""

import pytest
from accelerate.state import AcceleratorState

from scripts.lab.gpu_check import speed
from scripts.lab.gpu_check.check import check_gpu
from tests.scripts.lab.test_gpu_check import config, rows_of  # noqa: F401

pytestmark = pytest.mark.device


def test_the_mock_device_passes(mock, config, monkeypatch):  # noqa: F811
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "mock")
    monkeypatch.setattr(speed, "LEAST_SPEED", 0)
    check_gpu(config)
    AcceleratorState._reset_state(reset_partial_state=True)
    written = rows_of(config)
    failed = {row["what"]: row["found"] for row in written["rows"] if row["verdict"] == "fails"}
    assert failed.pop("domino, float32").startswith("NotImplementedError")  # it has a GRU, and the mock device none
    assert failed == {}
    assert written["device"] == mock.type
    assert sum(row["verdict"] == "ok" for row in written["rows"]) > 15

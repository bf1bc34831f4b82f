"""A cross-section of `make device-check`: the mock device would be the accelerator of all other tests of this process."""

import subprocess
import sys

import pytest

from configs.runtime.files import CHECKOUT

TESTS = [
    "test_decoding.py::test_the_tokens_are_the_cpus_and_a_round_waits_once[eagle3-chain block]",
    "test_decoding.py::test_the_tokens_are_the_cpus_and_a_round_waits_once[draft_lm-static greedy]",
    "test_training.py::test_the_losses_are_the_cpus_and_the_artifact_loads[eagle3]",
    "test_training.py::test_a_step_waits_for_its_losses_and_then_for_stop_requests_alone[draft_lm-online]",
]


@pytest.mark.timeout(900)  # it is compiled first where that was not done
def test_a_draft_model_and_a_head_decode_and_train_on_a_device_that_is_not_the_cpu():
    command = [sys.executable, "-m", "pytest", "-m", "device", *(f"tests/device/{each}" for each in TESTS), "--timeout", "600"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]

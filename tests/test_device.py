"""A cross-section of `make device-check`: the mock device would be the accelerator of all other tests of this process."""

import subprocess
import sys

import pytest

from configs.runtime.files import CHECKOUT

PART = "eagle3- or draft_lm- or eagle3] or draft_lm] or full"  # by the tests' names


@pytest.mark.timeout(900)  # it is compiled first where that was not done
def test_a_draft_model_and_a_head_decode_and_train_on_a_device_that_is_not_the_cpu():
    command = [sys.executable, "-m", "pytest", "-m", "device", "tests/device", "-k", PART, "--timeout", "600"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]

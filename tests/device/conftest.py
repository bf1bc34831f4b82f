"""A process whose accelerator is the mock device; these tests run apart from the others, by `make device-check`."""

import pytest
import torch

from tests.device.mock_device import register_mock_device


@pytest.fixture(scope="session", autouse=True)
def mock():
    """The mock device, registered."""
    register_mock_device()
    return torch.device("mock", 0)

"""Model FLOP utilisation: the peak of a device, where it is known."""

import pytest
import torch

from configs.schema.training import ScheduleConfig
from train.telemetry.step_metrics import find_peak

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "settings", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", {}, 989e12),
        ("NVIDIA H100 PCIe", {}, 756e12),
        ("NVIDIA L40S", {}, 362e12),
        ("NVIDIA H100 80GB HBM3", {"mixed_precision": "no"}, None),
        ("NVIDIA H100 80GB HBM3", {"mixed_precision": "no", "peak_tflops": 67.0}, 67e12),
        ("Another GPU", {}, None),
    ],
)
def test_the_peak_is_the_configs_or_the_data_sheets_in_16_bits(monkeypatch, name, settings, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert find_peak(GPU, ScheduleConfig(**settings)) == peak


def test_a_cpu_has_no_known_peak():
    assert find_peak(torch.device("cpu"), ScheduleConfig()) is None

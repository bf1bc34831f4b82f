"""Step metrics: the sums and counts of several processes are added up before they are divided."""

import os
import sys
from pathlib import Path

import pytest
import torch

from configs.schema.training import ScheduleConfig
from distill.dataset.batches import Example, collate
from train.telemetry import step_metrics
from train.telemetry.step_clock import STEP_PARTS, StepClock
from train.telemetry.step_metrics import SHARE, StepMetrics, find_peak, memory_peak


class Clock(StepClock):
    """Says what it is told."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.told = dict.fromkeys(STEP_PARTS, 0.0) | {"evaluation": 100.0, "checkpoint": 100.0}

    def seconds(self):
        return dict(self.told)


class TwoProcesses:
    """An accelerator whose other process has done what is handed in."""

    device = torch.device("cpu")

    def __init__(self):
        self.other = None

    def reduce(self, table, how):
        assert how == "sum"
        return table if self.other is None else table + self.other.reduced

    def gather(self, table):
        if self.other is None:
            return table
        return torch.cat([table, self.other.gathered])


class Recorder(TwoProcesses):
    """The accelerator of the other process, which keeps what it hands over."""

    def reduce(self, table, how):
        self.reduced = table
        return table

    def gather(self, table):
        self.gathered = table
        return table


def batch_of(*lengths):
    return collate([Example(tuple(range(5, 5 + length)), length - 3) for length in lengths])


def step(own, clock, lengths, value, norm, **seconds):
    window = [batch_of(*lengths)]
    for part, spent in seconds.items():
        clock.told[part] += spent
    own.add({"loss": torch.tensor(value)})
    own.close_step(window, 3 * len(lengths), torch.tensor(norm))


def test_what_two_processes_did_is_added_up_before_it_is_divided(monkeypatch):
    monkeypatch.setattr(step_metrics, "memory_peak", lambda _: 2.0**30)
    here, there = TwoProcesses(), Recorder()
    clocks = [Clock(), Clock()]
    own, other = (StepMetrics(each, clock, 3e7, 1e9) for each, clock in zip((here, there), clocks, strict=True))
    step(own, clocks[0], (10, 4), 12.0, 0.5, target=3.0, draft=1.0)
    step(own, clocks[0], (6,), 3.0, 1.5, loss=4.0)
    step(other, clocks[1], (20, 20, 20), 3.0, 1.0, data=6.0, communication=2.0)
    monkeypatch.setattr(step_metrics, "memory_peak", lambda _: 3.0 * 2**30)
    other.report()
    here.other = there
    monkeypatch.setattr(step_metrics, "memory_peak", lambda _: 2.0**30)
    report = own.report()
    assert report["loss"] == pytest.approx(18 / 18)
    assert report["gradient_norm"] == pytest.approx(1.0)
    assert report["labels_per_second"] == pytest.approx(18 / 8)
    assert report["tokens_per_second"] == pytest.approx(80 / 8)  # padding is none
    assert report["model_flop_utilization"] == pytest.approx(80 * 3e7 / (16 * 1e9))
    assert report["memory_peak_bytes"] == 3 * 2**30
    shares = {name.removeprefix(SHARE): share for name, share in report.items() if name.startswith(SHARE)}
    assert list(shares) == list(STEP_PARTS)
    assert {part: share * 16 for part, share in shares.items() if share} == pytest.approx(
        {"data": 6.0, "target": 3.0, "draft": 1.0, "loss": 4.0, "communication": 2.0}
    )
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_memory_is_at_least_what_is_held_now_and_no_more_than_there_is():
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0.99 * resident < memory_peak(torch.device("cpu")) < whole


def test_on_a_gpu_the_peak_is_that_of_its_memory(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: {"cuda:1": 77}[str(device)])
    assert memory_peak(torch.device("cuda:1")) == 77.0


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

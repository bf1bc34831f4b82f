"""What is measured of steps: sums of several processes are added before they are divided; all time is charged once."""

from contextlib import suppress

import pytest
import torch

from distill.dataset.batches import Example, collate
from train.loop import telemetry
from train.loop.telemetry import ASIDE, SHARE, STEP_PARTS, StepClock, StepMetrics


class Clock(StepClock):
    """Says what it is told."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.told = dict.fromkeys(STEP_PARTS, 0.0) | {"evaluation": 100.0, "checkpoint": 100.0}

    def seconds(self):
        return dict(self.told)


class TwoProcesses:
    """An accelerator whose other process had labels, a loss of as much a label, tokens and seconds of three times its own."""

    device = torch.device("cpu")

    def reduce(self, table, how):
        assert how == "sum"
        return 4 * table

    def gather(self, table):
        return torch.cat([table, 3 * table])


def step(metrics, clock, lengths, value, norm, **seconds):
    window = [collate([Example(tuple(range(5, 5 + length)), length - 3) for length in lengths])]
    for part, spent in seconds.items():
        clock.told[part] += spent
    metrics.add({"loss": torch.tensor(value)})
    metrics.close_step(window, 3 * len(lengths), torch.tensor(norm))


def test_what_two_processes_did_is_added_up_before_it_is_divided_and_each_report_begins_anew(monkeypatch):
    monkeypatch.setattr(telemetry, "memory_peak", lambda _: 2.0**30)
    clock = Clock()
    metrics = StepMetrics(TwoProcesses(), clock, 3e7)
    step(metrics, clock, (10, 4), 12.0, 0.5, target=3.0, backward=1.0)
    step(metrics, clock, (6,), 3.0, 1.5, loss=4.0)
    report = metrics.report()
    assert report["loss"] == pytest.approx(15 / 9)
    assert report["gradient_norm"] == pytest.approx(1.0)
    seconds = 8 + 24  # over both processes, which take as long: half of it each
    assert report["labels_per_second"] == pytest.approx(4 * 9 / (seconds / 2))
    assert report["tokens_per_second"] == pytest.approx(4 * 20 / (seconds / 2))  # padding is none
    assert report["model_tflops_per_second"] == pytest.approx(4 * 20 * 3e7 / seconds / 1e12)
    assert report["memory_peak_bytes"] == 3 * 2**30
    shares = {name.removeprefix(SHARE): share for name, share in report.items() if name.startswith(SHARE)}
    assert list(shares) == list(STEP_PARTS)
    assert {part: share * 8 for part, share in shares.items() if share} == pytest.approx(
        {"target": 3, "backward": 1, "loss": 4}
    )
    step(metrics, clock, (5,), 3.0, 3.0, backward=1.0)
    report = metrics.report()
    assert (report["loss"], report["gradient_norm"], report[f"{SHARE}backward"], report[f"{SHARE}loss"]) == (1, 3, 1, 0)


class Time:
    """A wall clock, and a GPU that is done with its queue some seconds after the CPU filled it."""

    def __init__(self, monkeypatch):
        self.now, self.gpu_busy_until, self.waits, self.events = 100.0, 100.0, 0, 0
        monkeypatch.setattr(telemetry.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(telemetry, "has_timed_events", lambda device: device.type == "cuda")
        monkeypatch.setattr(telemetry, "timed_event", lambda device: Event(self))

    def wait(self, seconds):
        self.now += seconds

    def launch(self, seconds):
        self.gpu_busy_until = max(self.now, self.gpu_busy_until) + seconds


class Event:
    def __init__(self, time):
        self.time = time
        self.time.events += 1
        self.record()

    def record(self):
        self.moment = max(self.time.now, self.time.gpu_busy_until)

    def synchronize(self):
        self.time.waits += 1

    def elapsed_time(self, end):
        return 1000 * (end.moment - self.moment)


@pytest.fixture
def time(monkeypatch):
    return Time(monkeypatch)


@pytest.fixture
def clock(time):
    return StepClock(torch.device("cpu"))


def counted(clock):
    return {part: pytest.approx(seconds) for part, seconds in clock.seconds().items() if seconds}


def test_all_time_from_the_start_is_charged_to_the_innermost_part_which_an_error_leaves_too(clock, time):
    with clock("target"):
        time.wait(64)
    clock.start()
    time.wait(1)
    with clock("evaluation"), clock("target"):  # what is aside has no parts of a step
        time.wait(64)
    with clock("loss"):
        time.wait(2)
        with suppress(KeyboardInterrupt), clock("target"):
            time.wait(4)
            raise KeyboardInterrupt
        time.wait(8)
    time.wait(16)
    assert counted(clock) == {"other": 17, "loss": 10, "target": 4, "evaluation": 64}
    time.wait(32)
    assert counted(clock)["other"] == 49
    assert set(clock.seconds()) == {*STEP_PARTS, *ASIDE}


def test_on_a_gpu_the_time_is_that_of_its_queue_and_nobody_waits_for_it_on_the_way(time):
    clock = StepClock(torch.device("cuda"))
    clock.start()
    with clock("target"):
        time.launch(5)
        time.wait(1)
    with clock("data"):  # the first 4 seconds of which the GPU still works on the draft
        time.wait(6)
    with clock("loss"):
        time.launch(3)
    assert time.waits == 0
    assert counted(clock) == {"target": 5, "data": 2, "loss": 3}
    assert sum(clock.seconds().values()) == pytest.approx(time.gpu_busy_until - 100)

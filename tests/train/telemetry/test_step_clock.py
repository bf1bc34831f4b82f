"""The clock of a run's parts: all time is charged once, to the innermost part, on a CPU and on a GPU's queue."""

from contextlib import suppress

import pytest
import torch

from train.telemetry import step_clock
from train.telemetry.step_clock import ASIDE, STEP_PARTS, StepClock


class Time:
    """A wall clock, and a GPU that is done with its queue some seconds after the CPU filled it."""

    def __init__(self, monkeypatch):
        self.now, self.gpu_busy_until, self.waits, self.events = 100.0, 100.0, 0, 0
        monkeypatch.setattr(step_clock.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(step_clock, "has_timed_events", lambda device: device.type == "cuda")
        monkeypatch.setattr(step_clock, "timed_event", lambda device: Event(self))

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

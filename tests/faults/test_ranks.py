"""Two processes over gloo: one that dies or hangs does not leave the other waiting; a stop asked of one is one of both."""

import signal
import time

import pytest

from configs.runtime.command import DONE, FAILED, TERMINATED
from tests.faults.conftest import at_call, die_at_step, send_here, start_pair
from train.launch import run_distillation
from train.loop.checkpoints import list_checkpoints, read_manifest
from train.tasks.draft import DraftTask
from train.tasks.held_out import HeldOut


@pytest.fixture
def start_two(project, tmp_path, start):
    """A function that starts a distillation in two processes, with a fault planted in the second."""

    def start_two(before=None, **schedule):
        config = project.distill(tmp_path / "run", **{"batch_size": 2} | schedule)
        return start_pair(start, run_distillation, config, before)

    return start_two


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_the_other_process_ends_with_the_reason(tmp_path, start_two, fault):
    plant = die_at_step(5) if fault == "dies" else at_call(DraftTask, "loss", 5, lambda: send_here(signal.SIGSTOP))
    started = time.monotonic()
    main, other = start_two(before=plant, process_timeout_seconds=5)
    assert main.end(60) == FAILED, main.said
    assert time.monotonic() - started < 60
    assert "another process of this run has ended or does not answer" in main.said
    assert "rerun the same command to resume" in main.said
    other.kill()
    assert [read_manifest(path).step for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == [3]
    assert [each.end() for each in start_two()] == [DONE, DONE]


def test_an_evaluation_may_take_longer_than_other_waits(start_two):
    late = at_call(HeldOut, "score", 1, lambda: time.sleep(8))
    children = start_two(before=late, process_timeout_seconds=5, max_steps=2)
    assert [child.end(60) for child in children] == [DONE, DONE], [child.said for child in children]


def slow_and_then_told_to_stop():
    """Let every loss take long, so that the other process waits in its backward; ask for an end in the fifth."""
    at_call(DraftTask, "loss", 5, lambda: send_here(signal.SIGTERM))()
    plain = DraftTask.loss

    def loss(*args):
        time.sleep(0.3)
        return plain(*args)

    DraftTask.loss = loss


def test_a_stop_asked_of_one_process_ends_both_after_the_same_step(tmp_path, start_two):
    children = start_two(before=slow_and_then_told_to_stop, log_every_steps=1)
    assert [child.end() for child in children] == [TERMINATED, TERMINATED], [child.said for child in children]
    (*_, newest) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert read_manifest(newest).step == 6
    assert [child.end() for child in start_two()] == [DONE, DONE]

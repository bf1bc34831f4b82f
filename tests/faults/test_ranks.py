"""Two processes over gloo: one that dies or hangs does not leave the other waiting; a stop asked of one is one of both."""

import os
import signal
import socket
import time

import pytest

from configs.command import DONE, TERMINATED
from tests.faults.test_training import die_at_step
from train.checkpoints import list_checkpoints, read_manifest
from train.draft_task import DraftTask
from train.launch import run_distillation


@pytest.fixture
def start_two(workshop, tmp_path, start):
    """A function that starts a distillation in two processes, with a fault planted in the second."""

    def start_two(before=None, **schedule):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        config = workshop.distill(tmp_path / "run", batch_size=2, **schedule)
        return [
            start(
                run_distillation,
                config,
                before=before if rank == "1" else None,
                environment={
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "WORLD_SIZE": "2",
                    "LOCAL_WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "ACCELERATE_USE_CPU": "true",
                },
            )
            for rank in "01"
        ]

    return start_two


def at_step(number, act):
    """Return a fault: `act` is called at the loss of step `number`."""

    def plant() -> None:
        plain, calls = DraftTask.loss, []

        def loss(*args):
            calls.append(1)
            if len(calls) == number:
                act()
            return plain(*args)

        DraftTask.loss = loss

    return plant


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_the_other_process_ends_with_the_reason(tmp_path, start_two, fault):
    plant = die_at_step(5) if fault == "dies" else at_step(5, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    started = time.monotonic()
    main, other = start_two(before=plant, process_timeout_seconds=5)
    assert main.end(60) == 1, main.said
    assert time.monotonic() - started < 60
    assert "another process of this run has ended or does not answer" in main.said
    assert "start it again to go on from the last checkpoint" in main.said
    other.kill()
    assert [read_manifest(path).step for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == [3]
    assert [each.end() for each in start_two()] == [DONE, DONE]


def test_a_stop_asked_of_one_process_ends_both_after_the_same_step(tmp_path, start_two):
    children = start_two(before=at_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert [child.end() for child in children] == [TERMINATED, TERMINATED], [child.said for child in children]
    (*_, newest) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert read_manifest(newest).step == 6
    assert [child.end() for child in start_two()] == [DONE, DONE]

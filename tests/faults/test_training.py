"""Training that is killed, stopped, run twice at once or out of disk: it goes on to the weights of an undisturbed run."""

import itertools
import re
import signal
import time

import pytest

from configs.runtime.command import BAD_INPUT, FAILED, TERMINATED
from tests.faults.conftest import at_call, content, die_at_step, kill_at_call, send_here
from tests.support.tiny_project import EVERY
from train.launch import run_distillation
from train.loop import checkpoints
from train.loop.checkpoints import list_checkpoints, read_manifest
from train.tasks.draft import DraftTask


def nan_from_step_8() -> None:
    plain, calls = DraftTask.loss, itertools.count(1)

    def loss(*args):
        outcome = plain(*args)
        return outcome if next(calls) < 8 else type(outcome)(loss=outcome.loss * float("nan"), sums=outcome.sums)

    DraftTask.loss = loss


def stop_at(name: str, call: int):
    return at_call(DraftTask, name, call, lambda: send_here(signal.SIGTERM))


KILLED = -signal.SIGKILL
FAULTS = {  # what is planted; the exit code; the newest checkpoint; what is said
    "killed between checkpoints": (die_at_step(8), KILLED, 6, ""),
    "killed before its rename": (kill_at_call(checkpoints, "_drop", 2), KILLED, 3, ""),
    # The signal comes after the step's count of labels: the processes agree on it with those of the next step.
    "stopped": (stop_at("loss", 6), TERMINATED, 7, "stopped by SIGTERM after step 7 of 12; a checkpoint is in"),
    "stopped where an evaluation is due": (stop_at("prepare", 6), TERMINATED, 6, "after step 6 of 12"),
    "stopped by a loss of nan": (nan_from_step_8, FAILED, 6, r"the loss is nan in step 8 .*, micro-batch 1, conversations \d+"),
}


@pytest.mark.parametrize(("plant", "code", "newest", "words"), FAULTS.values(), ids=FAULTS)
def test_a_disturbed_run_goes_on_to_the_same_weights(project, tmp_path, start, goes_on, plant, code, newest, words):
    disturbed = start(run_distillation, project.distill(tmp_path / "run"), before=plant)
    assert disturbed.end() == code, disturbed.said
    steps = [read_manifest(path).step for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert steps[-1] == newest
    assert re.search(words, disturbed.said)
    if code == TERMINATED:
        assert "Traceback" not in disturbed.said
        assert ("step 6/12, held out" in disturbed.said) == (newest == 7)  # else it is left to the run that goes on
    goes_on()
    assert {path.name for path in (tmp_path / "run").rglob(".*")} == {".lock"}


def test_a_second_process_on_the_same_run_is_refused_until_the_first_has_died(project, tmp_path, start, goes_on):
    def stall() -> None:
        DraftTask.loss = lambda *args: time.sleep(60)

    config = project.distill(tmp_path / "run")
    first = start(run_distillation, config, before=stall)
    deadline = time.monotonic() + 30
    while not (tmp_path / "run" / "run.json").exists():
        assert time.monotonic() < deadline, first.said
        time.sleep(0.02)
    second = start(run_distillation, config)
    assert second.end() == BAD_INPUT
    assert "error: output: another process is at work in" in second.said
    first.kill()
    goes_on()


def test_a_file_too_large_for_its_disk_is_a_sentence_too(project, tmp_path, start):
    def plant() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    full = start(run_distillation, project.distill(tmp_path / "run", eval_every_steps=12), before=plant)
    assert full.end() == BAD_INPUT
    assert f"error: cannot write {tmp_path}/run/checkpoints/step-0000000{EVERY}: " in full.said
    assert "Traceback" not in full.said
    assert content(tmp_path / "run" / "checkpoints") == {}

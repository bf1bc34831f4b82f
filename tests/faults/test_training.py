"""Training that is killed, stopped, run twice at once or out of disk: it goes on to the weights of an undisturbed run."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from accelerate import Accelerator

from configs.runtime.command import BAD_INPUT, DONE, TERMINATED
from scripts.fault_injection.children import Child
from scripts.fault_injection.setup import EVERY, STEPS
from tests.faults.conftest import at_call, content, die_at_step, final_weights, kill_here, send_here
from train.launch import run_distillation
from train.loop import checkpoints
from train.loop.checkpoints import list_checkpoints, read_manifest
from train.tasks.draft import DraftTask


def die_in_the_second_checkpoint(where: str):
    """Return a fault: the process is killed in its second checkpoint, half-way, before the rename, or after it."""
    owner, name = {
        "half-way": (Accelerator, "save_state"),
        "before the rename": (checkpoints, "_drop"),
        "after the rename": (checkpoints.Checkpoints, "_drop_others"),
    }[where]

    def plant() -> None:
        plain, calls = getattr(owner, name), []

        def deadly(*args):
            calls.append(1)
            if len(calls) == 1:
                return plain(*args)
            if where == "half-way":
                plain(*args)
                cut_short(Path(args[1]) / "optimizer.bin")
            return kill_here()

        setattr(owner, name, deadly)

    return plant


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("plant", "newest"),
    [
        (die_at_step(1), None),
        (die_at_step(8), 6),
        (die_in_the_second_checkpoint("half-way"), 3),
        (die_in_the_second_checkpoint("before the rename"), 3),
        (die_in_the_second_checkpoint("after the rename"), 6),
    ],
    ids=["at its first step", "between checkpoints", "half-way in one", "before its rename", "after its rename"],
)
def test_a_killed_run_goes_on_to_the_same_weights(project, undisturbed, tmp_path, start, distilled, plant, newest):
    config = project.distill(tmp_path / "run")
    assert start(run_distillation, config, before=plant).end() == -signal.SIGKILL
    steps = [read_manifest(path).step for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert steps[-1:] == ([] if newest is None else [newest])
    assert distilled().process.exitcode == DONE
    assert final_weights(tmp_path / "run") == final_weights(undisturbed["distill"])
    left = {path.name for path in (tmp_path / "run").rglob(".*")}
    assert left == {".lock"}


def test_sigterm_ends_with_a_checkpoint_and_its_own_code(project, undisturbed, tmp_path, start, distilled):
    # An evaluation and a checkpoint are due after it.
    plant = at_call(DraftTask, "loss", 6, lambda: send_here(signal.SIGTERM))
    stopped = start(run_distillation, project.distill(tmp_path / "run"), before=plant)
    assert stopped.end() == TERMINATED, stopped.said
    # The signal came after the step's count of labels: the processes agree on it with those of the next step.
    assert "stopped by SIGTERM after step 7 of 12; a checkpoint is in" in stopped.said
    assert "Traceback" not in stopped.said
    assert distilled().process.exitcode == DONE
    assert final_weights(tmp_path / "run") == final_weights(undisturbed["distill"])


def test_a_stop_where_an_evaluation_is_due_leaves_it_to_the_run_that_goes_on(project, undisturbed, tmp_path, start, distilled):
    plant = at_call(DraftTask, "prepare", 6, lambda: send_here(signal.SIGTERM))
    stopped = start(run_distillation, project.distill(tmp_path / "run"), before=plant)
    assert stopped.end() == TERMINATED, stopped.said
    assert "after step 6 of 12" in stopped.said
    assert "step 6/12, held out" not in stopped.said
    resumed = distilled()
    assert "step 6/12, held out" in resumed.said
    assert final_weights(tmp_path / "run") == final_weights(undisturbed["distill"])
    rows = [(tmp_path / "run" / "history.jsonl"), undisturbed["distill"] / "history.jsonl"]
    scores = [[without_time(line) for line in path.read_text().splitlines()] for path in rows]
    assert scores[0] == scores[1]


def without_time(line: str) -> dict[str, float]:
    return {name: value for name, value in json.loads(line).items() if name != "seconds"}


def test_a_second_process_on_the_same_run_is_refused_until_the_first_has_died(project, undisturbed, tmp_path, start):
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
    assert start(run_distillation, config).end() == DONE
    assert final_weights(tmp_path / "run") == final_weights(undisturbed["distill"])


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 1 MB at `tmp_path/run`, about six checkpoints; skips where it cannot be mounted."""
    folder = tmp_path / "run"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_a_sentence_and_the_checkpoint_before_stands(undisturbed, small_disk, distilled):
    filler = small_disk / "filler"
    filler.write_bytes(bytes(400_000))
    full = distilled(keep_checkpoints=9)
    assert full.process.exitcode == BAD_INPUT, full.said
    (complaint,) = [line for line in full.said.splitlines() if line.startswith("error: ")]
    assert "error: cannot write " in complaint
    assert "MB free on its disk); what was written before stands" in complaint
    assert "Traceback" not in full.said
    whole = [read_manifest(path).step for path in list_checkpoints(small_disk / "checkpoints")]
    assert whole
    assert whole[-1] < STEPS
    filler.unlink()
    resumed = distilled(keep_checkpoints=2)
    assert resumed.process.exitcode == DONE, resumed.said
    assert f"resumed from {small_disk}/checkpoints/step-{whole[-1]:08d}" in resumed.said
    assert final_weights(small_disk) == final_weights(undisturbed["distill"])


def test_a_file_too_large_for_its_disk_is_a_sentence_too(project, tmp_path, start):
    def plant() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    full = start(run_distillation, project.distill(tmp_path / "run", eval_every_steps=12), before=plant)
    assert full.end() == BAD_INPUT
    assert f"error: cannot write {tmp_path}/run/checkpoints/step-0000000{EVERY}: " in full.said
    assert "Traceback" not in full.said
    assert content(tmp_path / "run" / "checkpoints") == {}


def test_a_loss_that_is_not_finite_leaves_the_last_checkpoint(project, undisturbed, tmp_path, start, distilled):
    def plant() -> None:
        plain, calls = DraftTask.loss, []

        def loss(*args):
            calls.append(1)
            outcome = plain(*args)
            return outcome if len(calls) < 8 else type(outcome)(loss=outcome.loss * float("nan"), sums=outcome.sums)

        DraftTask.loss = loss

    stopped = start(run_distillation, project.distill(tmp_path / "run"), before=plant)
    assert stopped.end() == 1
    assert "the loss is nan in step 8" in stopped.said
    assert [read_manifest(path).step for path in list_checkpoints(tmp_path / "run" / "checkpoints")][-1] == 6
    assert distilled().process.exitcode == DONE
    assert final_weights(tmp_path / "run") == final_weights(undisturbed["distill"])


def test_two_children_are_not_one(tmp_path, project):
    """A child that was ended is told from one that ended, or the tests above would pass on anything."""
    assert Child(lambda config: 0, project.distill(tmp_path / "run"), tmp_path).end() == DONE
    assert Child(lambda config: kill_here(), project.distill(tmp_path / "run"), tmp_path).end() == -signal.SIGKILL

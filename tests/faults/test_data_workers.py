"""Processes that make batches ahead: they change nothing, and one that hangs or dies ends the run with its name."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import _utils, get_worker_info

from configs.runtime.command import BAD_INPUT, DONE, FAILED, TERMINATED
from distill.dataset.batches import ConversationDataset, make_loader
from distill.dataset.conversations import read_conversations
from distill.dataset.packing import make_packed_loader
from tests.faults.conftest import at_call, die_at_step, final_weights, kill_here, send_here
from train.launch import make_workers, run_distillation, run_heads
from train.loop.checkpoints import list_checkpoints, read_manifest
from train.tasks.draft import DraftTask

# More workers than cores only make a run slower, of which torch warns.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Let a worker notice after half a second, not five, that it is alone."""
    for module in (_utils, _utils.worker):
        monkeypatch.setattr(module, "MP_STATUS_CHECK_INTERVAL", 0.5)


FAILING = 1  # which worker, of three


def at_its_second_batch(act, checkpoint):
    """Return a fault: `act` is called in one worker at the first row of its second batch, that of step 5, once the
    checkpoint of step 3 is there.
    """

    def plant() -> None:
        plain, calls = ConversationDataset.__getitem__, []

        def read(dataset, index):
            info = get_worker_info()
            if info is not None and info.id == FAILING:
                calls.append(1)
                if len(calls) == 5:
                    while not checkpoint.exists():
                        time.sleep(0.01)
                    act()
            return plain(dataset, index)

        ConversationDataset.__getitem__ = read

    return plant


LATE = r"did not bring its batch within 2 s \(schedule\.process_timeout_seconds\)"
FAULTS = {
    "is stopped": (lambda: send_here(signal.SIGSTOP), LATE),
    "dies": (kill_here, "(is killed by signal: Killed|exited unexpectedly)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_that_fails_is_named_and_the_checkpoint_stands(project, tmp_path, start, goes_on, fault):
    act, how = FAULTS[fault]
    config = project.distill(tmp_path / "run", loader_workers=3, process_timeout_seconds=2)
    checkpoints = tmp_path / "run" / "checkpoints"
    failed = start(run_distillation, config, before=at_its_second_batch(act, checkpoints / "step-00000003"))
    assert failed.end(60) == FAILED, failed.said
    *_, said = [line for line in failed.said.splitlines() if "data worker" in line]
    found = re.match(rf"error: data worker {FAILING + 1} of 3 \(process (\d+)\) {how}\. Nothing is lost", said)
    assert found, said
    assert not living(int(found[1]))
    assert [read_manifest(path).step for path in list_checkpoints(checkpoints)] == [3]
    if fault == "is stopped":  # what lies on the disk is the same after each of them
        goes_on(loader_workers=1)


def living(process: int) -> bool:
    """Return whether a process is there, and is no mere entry in the table of a parent that has not asked for it yet."""
    status = Path(f"/proc/{process}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_a_machine_that_is_taken_away_asks_the_workers_too_and_still_gets_its_checkpoint(project, tmp_path, start, goes_on):
    def stop_the_group() -> None:  # by a process that is not the workers' parent: from that one they take it as the end
        subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], check=False)

    def plant() -> None:
        os.setpgrp()
        at_call(DraftTask, "prepare", 5, stop_the_group)()

    stopped = start(run_distillation, project.distill(tmp_path / "run", loader_workers=2), before=plant)
    assert stopped.end(60) == TERMINATED, stopped.said
    assert "stopped by SIGTERM after step 5 of 12" in stopped.said
    goes_on()


def test_a_row_that_a_worker_cannot_read_is_a_sentence(project, tmp_path, start):
    data = shutil.copytree(project.folder / "data", tmp_path / "data")
    config = project.distill(tmp_path / "run", loader_workers=2)
    config = config.model_copy(update={"data": config.data.model_copy(update={"train": str(data / "train.jsonl")})})

    def spoil() -> None:
        plain = DraftTask.__init__

        def init(*args, **settings):
            plain(*args, **settings)
            lines = (data / "train.jsonl").read_bytes().splitlines(keepends=True)
            (data / "train.jsonl").write_bytes(b"".join(reversed(lines)))

        DraftTask.__init__ = init

    failed = start(run_distillation, config, before=spoil)
    assert failed.end(60) == BAD_INPUT, failed.said
    (complaint,) = [line for line in failed.said.splitlines() if line.startswith("error: ")]
    assert complaint.startswith(f"error: conversations file {data / 'train.jsonl'}, byte ")
    assert "it was changed" in complaint or "the file was changed" in complaint


@pytest.mark.parametrize("work", ["distill", "heads"])
def test_a_packed_run_that_is_killed_goes_on_to_the_same_weights_with_any_workers(project, tmp_path, start, work):
    main = {"distill": run_distillation, "heads": run_heads}[work]

    def run(name, before=None, **schedule):
        config = getattr(project, work)(tmp_path / name, batch_size=1, max_steps=6, **schedule)
        packed = config.data.model_copy(update={"packing": True, "pack_length": 80})
        child = start(main, config.model_copy(update={"data": packed}), before=before)
        return child.end(60), child.said

    code, said = run("whole")
    assert code == DONE, said
    if work == "distill":
        code, _ = run("killed", before=die_at_step(5), loader_workers=1)
        assert code == -signal.SIGKILL
    code, said = run("killed", loader_workers=2)
    assert code == DONE, said
    assert final_weights(tmp_path / "killed", 6) == final_weights(tmp_path / "whole", 6)


def test_workers_make_the_same_batches_in_the_same_order(project):
    dataset = ConversationDataset(read_conversations(project.folder / "data" / "train.jsonl"), 64)
    workers = make_workers(project.distill(Path("run"), loader_workers=3).schedule)
    for make in (make_loader, lambda *args, **how: make_packed_loader(*args, pack_length=100, **how)):
        here, there = make(dataset, 4, seed=1), make(dataset, 4, seed=1, workers=workers)
        assert there.num_workers == 3
        for epoch in (0, 2):
            for loader in (here, there):
                loader.batch_sampler.set_epoch(epoch)
            for one, other in zip(here, there, strict=True):
                assert all(torch.equal(ours, theirs) for ours, theirs in zip(one[:5], other[:5], strict=True))

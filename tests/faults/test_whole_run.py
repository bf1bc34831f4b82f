"""A whole run, killed or out of disk in every stage: the same command goes on, and trains what an undisturbed one trains."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from configs.runtime.command import BAD_INPUT, GATE_FAILED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # each stage is a process of its own, and begins several times
STAGES = ("data", "cache", "train", "eval", "export", "check", "gate")
ASKED = ("mine", "--prompts", "prompts.csv", "--budget", "8m", "--for", "sglang", "--yes")
CHOSEN = ("runs/mine/draft.yaml", "--yes")


def said_by(folder):
    """Return where a run's output goes, which is not its disk."""
    return Path(tempfile.gettempdir()) / f"{folder.parent.name}-said.txt"


def begin(folder, *arguments):
    command = [sys.executable, "-m", "scripts.run", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with said_by(folder).open("w") as said:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=subprocess.STDOUT)


def ended(process, folder):
    return process.wait(), said_by(folder).read_text()


def steps(folder):
    path = folder / "runs" / "mine" / "steps.json"
    return json.loads(path.read_text())["steps"] if path.is_file() else {}


def wait_for(stage, folder, process):
    """Wait until a stage is under way."""
    while stage not in (now := steps(folder)) or now[stage]["done"]:
        assert process.poll() is None, said_by(folder).read_text()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def chosen(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """A folder with a model, prompts and a run of which everything is chosen and nothing begun."""
    folder = tmp_path_factory.mktemp("chosen")
    tiny_llama(seed=1, dtype=torch.float32, layers=8).save_pretrained(folder / "mine")
    tiny_tokenizer.save_pretrained(folder / "mine")
    (folder / "prompts.csv").write_text("\n".join(["prompt", *(f"w{n} w{2 * n % 59} w7" for n in range(59))]))
    process = begin(folder, *ASKED)
    wait_for("data", folder, process)
    process.terminate()
    process.wait()
    for stage in STAGES:
        shutil.rmtree(folder / "runs" / "mine" / stage, ignore_errors=True)
    (folder / "runs" / "mine" / "steps.json").unlink()
    return folder


@pytest.fixture(scope="module")
def undisturbed(chosen, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    shutil.copytree(chosen, folder)
    code, said = ended(begin(folder, *CHOSEN), folder)
    assert code == GATE_FAILED, said  # a random target's tokens are not to be guessed
    return folder


def assert_as(undisturbed, folder):
    for name in ("data/train.jsonl", "train/artifact/model.safetensors"):
        assert (folder / "runs/mine" / name).read_bytes() == (undisturbed / "runs/mine" / name).read_bytes()
    assert not (folder / "runs/mine/process.json").exists()


def test_a_run_that_is_killed_in_every_stage_goes_on(chosen, undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(chosen, folder)
    for stage in STAGES:
        process = begin(folder, *CHOSEN)
        wait_for(stage, folder, process)
        process.send_signal(signal.SIGKILL)  # and the stage it has begun is left to itself
        assert process.wait() == -signal.SIGKILL
    code, said = ended(begin(folder, *CHOSEN), folder)
    assert code == GATE_FAILED, said
    assert_as(undisturbed, folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_run_whose_disk_is_full_in_every_stage_says_so_and_goes_on(chosen, undisturbed, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True)
    try:
        folder, filling = disk / "run", disk / "filling"
        shutil.copytree(chosen, folder)
        for stage in STAGES[:4]:  # the others write a few lines
            process = begin(folder, *CHOSEN)
            wait_for(stage, folder, process)
            with suppress(OSError), filling.open("wb") as file:
                while True:
                    file.write(bytes(4096))
            code, said = ended(process, folder)
            filling.unlink(missing_ok=True)
            assert code == BAD_INPUT, said
            assert "No space left on device" in said or "its disk has 0.0 MB free" in said  # a cache asks first
            assert "Traceback" not in said
        code, said = ended(begin(folder, *CHOSEN), folder)
        assert code == GATE_FAILED, said
        assert_as(undisturbed, folder)
    finally:
        subprocess.run(["umount", str(disk)], check=True)

"""The wheel, installed by pip where nothing of the checkout is: its commands run in any folder, and write there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from configs.runtime.command import GATE_FAILED

ROOT = Path(__file__).resolve().parent.parent
# What is read beside the code in a checkout only: set-up, and what the images are made of.
CHECKOUT_ONLY = re.compile(r"scripts/(\w+\.(sh|txt)|docker/.*)")
# A command, a part of what it says, and what it writes into the folder that it is run in.
COMMANDS = {
    "--help": ("doctor", []),
    "heads --help": ("--config FILE", []),
    "gate --help": ("--config FILE", []),
    "push --help": ("--config FILE", []),
    "doctor": ("missing, and for what", []),
    "plan --config configs/plan/eagle3_70b.yaml": ("recipe: take ddp_gpus", []),
    "data --config configs/data/heads.yaml --print-config": ("output: runs/heads/data", []),
    "run --print-config": ("budget_minutes: 60", []),
    "watch --help": ("RUN", []),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment that has the wheel and the packages it depends on, and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "runs", "build", "tests", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT, folder / "source", ignore=left_out)  # setuptools builds where the source lies
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run([*pip, *wheel], check=True, capture_output=True, text=True)
    shutil.rmtree(source)
    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    install = ["--python", str(environment / "bin" / "python"), "install", "--no-deps", str(next(folder.glob("*.whl")))]
    subprocess.run([*pip, *install], check=True, capture_output=True, text=True)
    # The packages of this environment, whose own .pth files, the checkout's among them, are not read there.
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


@pytest.fixture
def run(installed, tmp_path):
    """A function that runs a program of that environment in an empty folder, which it gives with what was said."""
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DRAFTSMITH", "VIRTUAL_ENV"))}

    def call(program, *arguments, code=0):
        variables = kept | {"HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [str(installed / "bin" / program), *arguments]
        before = {path for path in installed.rglob("*") if path.suffix != ".pyc"}
        done = subprocess.run(command, cwd=work, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert {path for path in installed.rglob("*") if path.suffix != ".pyc"} == before
        assert {path.name for path in home.iterdir()} <= {".cache", ".config"}  # other packages' own
        return done.stdout, work

    return call


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_in_any_folder_and_writes_there(run, command):
    part, written = COMMANDS[command]
    said, folder = run("draftsmith", *command.split())
    assert part in said
    assert sorted(path.name for path in folder.iterdir()) == written


@pytest.mark.slow  # two minutes: each stage, and its dry run, is a process of its own
@pytest.mark.timeout(1800)
def test_a_run_leads_from_a_model_to_an_export_in_any_folder(run, tiny_llama, tiny_tokenizer, tmp_path):
    work = tmp_path / "work"
    tiny_llama(seed=1, dtype=torch.float32, layers=8).save_pretrained(work / "mine")
    tiny_tokenizer.save_pretrained(work / "mine")
    (work / "prompts.csv").write_text("\n".join(["prompt", *(f"w{n} w{2 * n % 59} w7" for n in range(59))]))
    asked = ["run", "mine", "--prompts", "prompts.csv", "--budget", "4m", "--for", "sglang", "--yes"]
    run("draftsmith", *asked, code=GATE_FAILED)  # a random target's tokens are not to be guessed
    assert {path.name for path in work.iterdir()} == {"mine", "prompts.csv", "runs"}
    assert (work / "runs" / "mine" / "export" / "sglang" / "serve.txt").is_file()


def test_what_is_read_beside_the_code_came_along(installed):
    (wheel,) = installed.parent.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = ("configs", "heads", "distill", "eval", "train", "scripts")
    files = [path for package in packages for path in (ROOT / package).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    needed = [path.relative_to(ROOT).as_posix() for path in files if ROOT / "scripts" / "bench" not in path.parents]
    assert [name for name in needed if name not in names and not CHECKOUT_ONLY.fullmatch(name)] == []

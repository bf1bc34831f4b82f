"""`make setup` on a bare machine; the images and the compose file, read as what they are."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


PIN = re.search("^torch==.+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE).group()
CPU, UNLABELLED, CUDA = f"{PIN}+cpu", PIN, f"{PIN} nvidia-nccl"
REST = [".[dev]", "speculators"]
# pip on the indexes `machine` and `cpu`: files with a line for each build, its name and what that requires.
PIP = f"""#!{sys.executable}
import sys
from pathlib import Path

*options, wanted = sys.argv[1:]
if wanted in {REST}:
    found = [""]
elif wanted != "--version":
    index = Path("cpu" if "--index-url" in options else "machine").read_text().splitlines()
    found = [line for line in index if line.split()[0] == wanted] or sys.exit(1)
if "--dry-run" in options:
    print([f'"name": "{{name}}"' for name in found[0].split()])
elif wanted != "--version":
    with Path("installed").open("a") as file:
        file.write(wanted + "\\n")
"""


@pytest.mark.parametrize(
    ("machine", "cpu", "settings", "installed", "says"),
    [
        ([CUDA], [CPU], {}, [CPU, *REST], "/cpu"),  # as the public index
        ([CPU, CUDA], [], {}, [CPU, *REST], ""),
        ([UNLABELLED], [], {}, [UNLABELLED, *REST], "/cpu"),
        ([CUDA], [], {}, [], "set TORCH_INDEX_URL to a mirror"),
        ([CPU], [UNLABELLED], {"TORCH_INDEX_URL": "mirror"}, [UNLABELLED, *REST], ""),
        ([CUDA], [CPU], {"GPU": "1"}, REST, ""),
        ([CUDA], [CPU], {"ALLOW_CUDA": "1"}, REST, ""),
    ],
)
def test_the_build_of_torch_is_the_machines_and_a_cpu_build_comes_first_and_alone(
    tmp_path, machine, cpu, settings, installed, says
):
    for name in ("scripts/setup.sh", "scripts/cpu_torch.sh", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, lines in {"machine": machine, "cpu": cpu, "installed": []}.items():
        (tmp_path / name).write_text("\n".join(lines))
    for name, text in {".venv/bin/python": PIP, "tools/nvidia-smi": '#!/bin/sh\n[ -n "$GPU" ]\n'}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path / 'tools'}:{os.environ['PATH']}", "PYTHON": sys.executable, **settings}
    done = subprocess.run(["sh", "scripts/setup.sh"], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    found = (tmp_path / "installed").read_text().splitlines()
    assert (done.returncode, found) == (0 if installed else 2, installed), done.stderr
    assert says in done.stdout + done.stderr
    if installed:
        assert ("/cpu" in done.stdout) is (says == "/cpu")  # PyTorch's own index is asked last


def test_every_dependency_of_the_project_is_pinned():
    pins = {line.partition("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()}
    required = [re.match(r"[\w-]+", line).group().lower() for line in metadata.requires("draftsmith") if "cluster" not in line]
    assert required
    assert [name for name in required if name not in pins] == []


# --- images, where there is no Docker -----------------------------------------------------------------------------------


DOCKER = ROOT / "scripts" / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
IMAGES = ["cpu", "cuda"]


def test_what_git_ignores_stays_out_of_an_image():
    patterns = [each.removeprefix("**/") for each in (ROOT / ".dockerignore").read_text().split()]
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    assert [name for name in [".git", *ignored] if not any(fnmatch.fnmatch(name, each) for each in patterns)] == []


@pytest.mark.parametrize("image", IMAGES)
def test_vllm_is_started_by_the_line_of_the_export(image, tmp_path):
    service = COMPOSE["services"][f"vllm-{image}"]
    command = ["vllm", "serve", "/cache/it's", "--speculative-config", json.dumps({"model": 'of "$HOME"'})]
    export = tmp_path / "runs" / "demo" / "export" / "vllm"
    export.mkdir(parents=True)
    (export / "serve.txt").write_text(f"Serve with vllm:\n\n{shlex.join(command)}\n\n- vllm serve takes more\n")
    (tmp_path / "vllm").write_text(f'#!{sys.executable}\nimport json, sys\nprint(json.dumps(["vllm", *sys.argv[1:]]))\n')
    (tmp_path / "vllm").chmod(0o755)
    words = [word.replace("$$", "$") for word in [*service["entrypoint"], *service["command"]]]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [*command, *service["command"]]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])  # no key is asked for

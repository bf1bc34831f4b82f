"""`make setup` on a bare machine, from pinned indexes; the images and the compose file, read as what they are."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def bare_machine(tmp_path):
    """Return a function that runs set-up with two indexes of torch's builds, and gives its result and what it installed.

    pip is the real one, but for the last step, the project's own installation, which is only noted.
    """
    for name in ("scripts/setup.sh", "scripts/cpu_torch.sh", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = (ROOT / name).read_text().replace("https://download.pytorch.org/whl", tmp_path.as_uri())
        (tmp_path / name).write_text(text)
    tools, interpreter = tmp_path / "tools", tmp_path / ".venv" / "bin" / "python"
    tools.mkdir()
    interpreter.parent.mkdir(parents=True)
    for tool in ("dirname", "grep"):
        (tools / tool).symlink_to(shutil.which(tool))
    the_rest = '*"-c constraints.txt -e .[dev]") echo "${*#*install }" >> the_rest ;;'
    _write_tool(interpreter, f'#!/bin/sh\ncase "$*" in {the_rest} *) exec {sys.executable} "$@" ;; esac\n')

    def run(machine: list[str], cpu: list[str], *, gpu: bool = False, **environment: str):
        for place, packages in {"machine": machine, "cpu": cpu}.items():
            for package in packages:
                _write_wheel(tmp_path / place, package)
        _write_tool(tools / "nvidia-smi", f"#!/bin/sh\nexit {0 if gpu else 9}\n")
        variables = {"PATH": str(tools), "PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
        variables |= {"PIP_INDEX_URL": (tmp_path / "machine").as_uri(), "PIP_TARGET": str(tmp_path / "site"), **environment}
        if "TORCH_INDEX_URL" in environment:
            variables["TORCH_INDEX_URL"] = (tmp_path / environment["TORCH_INDEX_URL"]).as_uri()
        done = subprocess.run(
            [shutil.which("sh"), "scripts/setup.sh"], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        installed = {path.name.removesuffix(".dist-info") for path in (tmp_path / "site").glob("*.dist-info")}
        return done, installed | {"the rest" for _ in tmp_path.glob("the_rest")}

    return run


TORCH = re.search("^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE).group(1)
CPU, UNLABELLED, CUDA = f"torch-{TORCH}+cpu", f"torch-{TORCH}", f"torch-{TORCH} nvidia-nccl"


REST = "the rest"


@pytest.mark.parametrize(
    ("machine", "cpu", "settings", "installed", "says"),
    [
        ([CUDA, "nvidia_nccl-1"], [CPU], {}, {CPU, REST}, "/cpu"),  # as the public index
        ([CPU, CUDA, "nvidia_nccl-1"], [], {}, {CPU, REST}, ""),
        ([UNLABELLED], [], {}, {UNLABELLED, REST}, "/cpu"),
        ([CUDA, "nvidia_nccl-1"], [], {}, set(), "set TORCH_INDEX_URL to a mirror"),
        ([CPU], [UNLABELLED], {"TORCH_INDEX_URL": "cpu"}, {UNLABELLED, REST}, ""),
        ([CUDA], [CPU], {"gpu": True}, {REST}, ""),
        ([CUDA], [CPU], {"ALLOW_CUDA": "1"}, {REST}, ""),
    ],
)
def test_the_build_of_torch_is_the_machines_and_a_cpu_build_comes_first_and_alone(
    bare_machine, machine, cpu, settings, installed, says
):
    done, found = bare_machine(machine, cpu, **settings)
    assert (done.returncode, found) == (0 if installed else 2, installed), done.stderr
    assert says in done.stdout + done.stderr
    if installed and "TORCH_INDEX_URL" not in settings:
        assert ("/cpu" in done.stdout) is (says == "/cpu")  # PyTorch's own index is asked last


def test_every_dependency_of_the_project_is_pinned():
    pins = {line.partition("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()}
    required = [re.match(r"[\w-]+", line).group().lower() for line in metadata.requires("draftsmith") if "cluster" not in line]
    assert required
    assert [name for name in required if name not in pins] == []


def _write_tool(path: Path, script: str) -> None:
    path.write_text(script)
    os.chmod(path, 0o755)


def _write_wheel(index: Path, package: str) -> None:
    """Put an empty package into a package index: `name-version` and the names that it requires."""
    name, *required = package.split()
    folder = index / name.partition("-")[0].replace("_", "-")
    folder.mkdir(parents=True, exist_ok=True)
    wheel = f"{name}-{2 if required else 1}-py3-none-any.whl"  # two builds of a version in one folder have different names
    described = [
        "Metadata-Version: 2.1",
        "Name: {}".format(name.partition("-")[0]),
        "Version: {}".format(name.partition("-")[2]),
    ]
    described += [f"Requires-Dist: {each}" for each in required]
    with zipfile.ZipFile(folder / wheel, "w") as file:
        file.writestr(f"{name}.dist-info/METADATA", "\n".join(described))
        file.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{name}.dist-info/RECORD", "")
    links = [f'<a href="{path.name.replace("+", "%2B")}">{path.name}</a>' for path in folder.glob("*.whl")]
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")


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

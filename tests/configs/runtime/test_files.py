"""Writing leaves a whole file or nothing, reading names what is wrong and where; journals of pieces; the record of a run."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import subprocess
import sys
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

import pytest

from configs.runtime.errors import InputError
from configs.runtime.files import (
    CHECKOUT,
    check_readable,
    folder_lock,
    new_folder,
    read_json,
    read_jsonl,
    write_json,
    write_text,
)
from configs.runtime.run_record import Journal, describe_git, describe_hardware, write_run_record
from configs.schema.decoding import DecodeConfig


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


def test_what_a_killed_process_left_of_a_new_folder_is_removed_by_the_next_and_what_a_living_one_makes_is_not(tmp_path):
    make = "import sys, time, pathlib; from configs.runtime.files import new_folder\n"
    make += f"with new_folder(pathlib.Path({str(tmp_path / 'made')!r})): print(flush=True); time.sleep(600)"
    with ExitStack() as stack:
        children = []
        for _ in range(2):
            child = stack.enter_context(subprocess.Popen([sys.executable, "-c", make], cwd=CHECKOUT, stdout=subprocess.PIPE))
            stack.callback(child.kill)
            children.append(child)
            child.stdout.readline()
        for scratch in tmp_path.iterdir():
            os.utime(scratch, (0, 0))
        children[0].kill()
        children[0].wait()
        with new_folder(tmp_path / "made"):
            assert len([*tmp_path.iterdir()]) == 2
        assert len([*tmp_path.iterdir()]) == 2


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


# --- journals of finished pieces ----------------------------------------------------------------------------------------


@pytest.fixture
def pieces(tmp_path):
    return tmp_path / "new" / "pieces.jsonl"


def filled(path, job="job"):
    file = Journal(path, job)
    file.append("a", [1])
    file.append("b", {"text": "line\u2028break"})
    return path.read_bytes()


def test_pieces_come_back_and_a_file_cut_anywhere_in_its_last_line_goes_on_as_if_nothing_had_happened(pieces):
    path = pieces
    whole = filled(path)
    assert Journal(path, "job").read() == {"a": [1], "b": {"text": "line\u2028break"}}
    for cut in range(1, 30):
        path.write_bytes(whole[:-cut])
        file = Journal(path, "job")
        assert file.read() == {"a": [1]}
        file.append("b", {"text": "line\u2028break"})
        assert path.read_bytes() == whole


def test_pieces_of_another_job_are_neither_read_nor_kept(pieces):
    path = pieces
    fresh = filled(path)
    path.unlink()
    other = Journal(path, "other")
    for key in "abcdefg":
        other.append(key, "something long" * 10)
    assert Journal(path, "job").read() == {}
    assert filled(path) == fresh


@pytest.mark.parametrize("damaged", [b"[1]\n", b'{"key": 1, "piece": 2}\n', b'{"key": "b"}\n', b"[" * 100_000 + b"\n"])
def test_a_line_damaged_since_ends_what_is_read_and_is_written_over(pieces, damaged):
    path = pieces
    Journal(path, "job").append("a", 1)
    with path.open("ab") as file:
        file.write(damaged)
    again = Journal(path, "job")
    assert again.read() == {"a": 1}
    again.append("b", 2)
    assert Journal(path, "job").read() == {"a": 1, "b": 2}


# --- the record beside every result -------------------------------------------------------------------------------------


def git(folder, *arguments):
    identity = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.com"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_a_run_record_holds_everything_a_number_is_traced_by(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "eval/run.py", "--set", "seed=3"])
    path = write_run_record(tmp_path / "new" / "run", DecodeConfig(seed=3), seconds=1.5)
    record = json.loads(path.read_text())
    assert path == tmp_path / "new" / "run" / "run.json"
    assert list(record) == ["command", "started", "config", "versions", "git", "hardware", "seconds"]
    assert record["command"] == ["python", "eval/run.py", "--set", "seed=3"]
    assert DecodeConfig.model_validate(record["config"]) == DecodeConfig(seed=3)
    assert datetime.now(UTC) - datetime.fromisoformat(record["started"]) < timedelta(minutes=1)
    assert record["seconds"] == 1.5


def test_git_tells_the_commit_and_whether_the_tree_differs_from_it(tmp_path, monkeypatch):
    assert describe_git(tmp_path) == {"commit": None, "dirty": None}
    git(tmp_path, "init")
    assert describe_git(tmp_path) == {"commit": None, "dirty": None}
    git(tmp_path, "commit", "--allow-empty", "-m", "first")
    clean = describe_git(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "README.md").write_text("documents do not count")
    assert describe_git(tmp_path) == clean
    (tmp_path / "new").write_text("x")
    assert describe_git(tmp_path) == clean | {"dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_git() == {"commit": None, "dirty": None}


def test_gpus_are_read_from_nvidia_smi_and_a_machine_without_it_has_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    hardware = describe_hardware()
    assert hardware["gpus"] == []
    assert hardware["cpu"]
    assert 1 <= hardware["cores"] <= os.cpu_count()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 580.1'\necho 'NVIDIA A100, SXM, [N/A], 580.1'\n")
    tool.chmod(0o755)
    assert describe_hardware()["gpus"] == [
        {"name": "NVIDIA H200", "memory_bytes": 143771 * 2**20, "driver": "580.1"},
        {"name": "NVIDIA A100, SXM", "memory_bytes": None, "driver": "580.1"},
    ]


@pytest.mark.timeout(20)
def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "merges.txt")
    with pytest.raises(InputError, match=r"merges\.txt"):
        check_readable(tmp_path)

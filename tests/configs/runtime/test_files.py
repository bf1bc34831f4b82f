"""Writing leaves a whole file or nothing; reading names what is wrong and where."""

from __future__ import annotations

import errno
import fcntl
import logging
import math
from pathlib import Path
from typing import NoReturn

import pytest

from configs.runtime.errors import InputError
from configs.runtime.files import (
    folder_lock,
    new_folder,
    read_json,
    read_jsonl,
    read_text,
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

"""Partial files: what was finished survives, what was torn does not, and nobody takes another job's work."""

import pytest

from configs.runtime.resumable import Journal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "pieces.jsonl"


def filled(path, job="job"):
    file = Journal(path, job)
    file.append("a", [1])
    file.append("b", {"text": "line\u2028break"})
    return path.read_bytes()


def test_pieces_come_back_and_a_file_cut_anywhere_in_its_last_line_goes_on_as_if_nothing_had_happened(path):
    whole = filled(path)
    assert Journal(path, "job").read() == {"a": [1], "b": {"text": "line\u2028break"}}
    for cut in range(1, 30):
        path.write_bytes(whole[:-cut])
        file = Journal(path, "job")
        assert file.read() == {"a": [1]}
        file.append("b", {"text": "line\u2028break"})
        assert path.read_bytes() == whole


def test_pieces_of_another_job_are_neither_read_nor_kept(path):
    fresh = filled(path)
    path.unlink()
    other = Journal(path, "other")
    for key in "abcdefg":
        other.append(key, "something long" * 10)
    assert Journal(path, "job").read() == {}
    assert filled(path) == fresh


@pytest.mark.parametrize("damaged", [b"[1]\n", b'{"key": 1, "piece": 2}\n', b'{"key": "b"}\n', b"[" * 100_000 + b"\n"])
def test_a_line_damaged_since_ends_what_is_read_and_is_written_over(path, damaged):
    Journal(path, "job").append("a", 1)
    with path.open("ab") as file:
        file.write(damaged)
    again = Journal(path, "job")
    assert again.read() == {"a": 1}
    again.append("b", 2)
    assert Journal(path, "job").read() == {"a": 1, "b": 2}

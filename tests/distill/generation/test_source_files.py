"""The same rows from every kind of file, a byte order mark skipped, and wrong files refused by name and line."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from configs.runtime.errors import InputError
from distill.generation.source_files import read_source

ROWS = [{"prompt": "one, \u2028two", "n": "1"}, {"prompt": 'a "b"', "n": "2"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
CSV = 'prompt,n\n"one, \u2028two",1\n"a ""b""",2\n'


def parquet(path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


FILES = {
    "a.jsonl": LINES.encode(),
    "bom.jsonl": b"\xef\xbb\xbf" + LINES.encode(),
    "a.jsonl.gz": gzip.compress(LINES.encode()),
    "a.json": json.dumps(ROWS).encode(),
    "lines.json": LINES.encode(),
    "a.csv": CSV.encode(),
    "a.csv.gz": gzip.compress(CSV.encode()),
    "a.tsv": CSV.replace(",n", "\tn").replace('",', '"\t').encode(),
    "a.parquet": parquet,
}


def write(path, content):
    content(path) if callable(content) else path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    rows = list(read_source(write(tmp_path / name, FILES[name]), "prompt file"))
    assert [row for _, row in rows] == ROWS
    assert all(where.startswith(f"prompt file {tmp_path / name}, ") for where, _ in rows)


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    path = write(tmp_path / "a.txt", b"One.\r\n\nTwo.\n")
    assert [row for _, row in read_source(path, "prompt file")] == [{"text": "One."}, {"text": "Two."}]


def test_a_json_file_may_be_one_object_over_several_lines(tmp_path):
    path = write(tmp_path / "a.json", json.dumps(ROWS[0], indent=2).encode())
    assert [row for _, row in read_source(path, "prompt file")] == ROWS[:1]


def test_a_field_of_csv_may_be_a_long_document(tmp_path):
    long = "word " * 30_000
    path = write(tmp_path / "a.csv", f"prompt\n{long}\n".encode())
    assert [row for _, row in read_source(path, "prompt file")] == [{"prompt": long}]


def test_a_folder_is_all_of_its_files_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("b/2.txt", "1.txt", "notes.md"):
        write(tmp_path / name, name.encode())
    assert [row["text"] for _, row in read_source(tmp_path, "prompt file")] == ["1.txt", "b/2.txt"]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b"{", "line 1: not JSON"),
        ("a.jsonl", b"\xff", "cannot read prompt file"),
        ("a.jsonl", b"\n", "is empty"),
        ("a.json", b"[1]", "entry 0: expected an object, got int"),
        ("a.json", b"[{]", "is not JSON"),
        ("a.csv", b"a,b\n1\n", "line 2: expected 2 fields"),
        ("a.csv", b"a,b,a\n1,2,3\n", "line 1 names the column 'a' twice"),
        ("a.csv", b'a,b\n"1"2,3\n', "line 2: not CSV"),
        ("a.parquet", b"PAR1", "cannot read prompt file"),
        ("a.jsonl.gz", b"no gzip", "cannot read prompt file"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path, name, content, complaint):
    with pytest.raises(InputError, match=complaint):
        list(read_source(write(tmp_path / name, content), "prompt file"))


def test_a_folder_without_such_files_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"the folder holds no file of \.jsonl"):
        list(read_source(tmp_path, "prompt file"))

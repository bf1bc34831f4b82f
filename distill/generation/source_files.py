"""Rows of the files people keep prompts and conversations in: JSON lines or an array, CSV, TSV, Parquet, text; of data sets.

What a row means is decided by `distill.generation.row_formats`.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import datasets
import pyarrow
import pyarrow.parquet

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import json_object

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
MAX_CSV_FIELD = 2**31 - 1  # characters; Python's csv module allows 131,072
SourceRow = tuple[str, dict[str, Any]]  # where it stands, for error messages; its keys and values


def read_source(path: Path, what: str, *, still_written: bool = False) -> Iterator[SourceRow]:
    """Yield the rows of a file, `.gz` or not, or of all files of a folder that have one of `SUFFIXES`, in order of their names.

    Rows of a `.txt` file are its lines that are not blank, as `text`. A file with another suffix is read as JSON lines; where
    another program may be adding to it (`still_written`), a last line without its end is left out. `what` is the role of the
    path in error messages, such as `prompt file`.
    """
    if not path.exists():
        raise InputError(f"{what} not found: {path}")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _suffix(file) in SUFFIXES and file.is_file())
        if not files:
            raise InputError(f"{what} {path}: the folder holds no file of {', '.join(SUFFIXES)}")
    rows = chain.from_iterable(_read_file(file, what, still_written) for file in files)
    first = next(rows, None)
    if first is None:
        raise InputError(f"{what} {path} is empty")
    yield from chain([first], rows)


def load_rows(path: str, subset: str | None, split: str, *, revision: str | None = None, section: str) -> datasets.Dataset:
    """Open a data set saved by `save_to_disk`, a folder of data files, or one of the Hub, there at a `revision`."""
    try:
        if any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(path)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(path, subset, split=split, revision=revision)
    except KeyError as error:
        raise InputError(f"{section}.split: data set {path} has no split {split!r}; it has {', '.join(loaded)}") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(f"{section}.path: data set {path} could not be loaded: {first_line(error)}") from error


def _suffix(path: Path) -> str:
    return path.with_suffix("").suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def _read_file(path: Path, what: str, still_written: bool) -> Iterator[SourceRow]:
    where, suffix = f"{what} {path}", _suffix(path)
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            match suffix:
                case ".parquet":
                    batches = pyarrow.parquet.ParquetFile(file).iter_batches()
                    for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
                        yield f"{where}, row {number}", row
                case ".csv" | ".tsv":
                    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
                    yield from _csv_rows(text, "\t" if suffix == ".tsv" else ",", where)
                case ".txt":
                    yield from ((place, {"text": line.decode().strip("\r\n")}) for place, line in _lines(file, where))
                case ".json":
                    yield from _json_rows(file.read(), where)
                case _:
                    yield from _line_rows(file, where, still_written)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise InputError(f"cannot read {where}: {first_line(error)}") from error


def _lines(file: Iterable[bytes], where: str) -> Iterator[tuple[str, bytes]]:
    """Yield lines that are not blank, without a byte order mark. Bytes split at newlines alone, unlike `str.splitlines`."""
    for number, line in enumerate(file, 1):
        if (line := line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip():
            yield f"{where}, line {number}", line


def _line_rows(file: Iterable[bytes], where: str, still_written: bool) -> Iterator[SourceRow]:
    for place, line in _lines(file, where):
        try:
            row = json_object(line.decode(), place)
        except (InputError, UnicodeDecodeError):
            if still_written and not line.endswith(b"\n"):
                return
            raise
        yield place, row


def _json_rows(content: bytes, where: str) -> Iterator[SourceRow]:
    """Yield the rows of an array, one object, or lines of an object each."""
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if not isinstance(error, UnicodeDecodeError) and content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            raise InputError(f"{where} is not JSON: {error}") from error
        yield from _line_rows(io.BytesIO(content), where, still_written=False)
        return
    for number, row in enumerate(value if isinstance(value, list) else [value]):
        if not isinstance(row, dict):
            raise InputError(f"{where}, entry {number}: expected an object, got {type(row).__name__}")
        yield f"{where}, entry {number}", row


def _csv_rows(text: TextIO, delimiter: str, where: str) -> Iterator[SourceRow]:
    csv.field_size_limit(MAX_CSV_FIELD)
    reader = csv.DictReader(text, delimiter=delimiter, strict=True)
    try:
        names = [name for name in reader.fieldnames or () if name]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"{where}: line 1 names the column {twice!r} twice")
        for row in reader:
            if None in row or None in row.values():
                raise InputError(
                    f"{where}, line {reader.line_num}: expected {len(reader.fieldnames or ())} fields as in line 1"
                )
            yield f"{where}, line {reader.line_num}", dict(row)
    except csv.Error as error:
        raise InputError(f"{where}, line {reader.line_num + 1}: not CSV: {error}") from error

"""The prompts of a file, a folder or a data set.

JSON is read here and not by `datasets`, which gives all rows the keys and types of some, and so would change messages, tools
and numbers. `distill.generation.row_forms` says what a row asks.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.csv
import pyarrow.parquet

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import IS_POINTER, LFS_POINTER
from configs.schema.data import PromptsConfig
from distill.generation.bad_rows import BadRow, LeftOut, OnBadRow, refuse
from distill.generation.prompts import UNCATEGORISED, Prompt, choose_prompts, fold_chats, hash_position, turns_of
from distill.generation.row_forms import COLUMN, detect_format, hash_of, read_row

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
LONGEST_ROW = 2**24  # bytes of a row of CSV
SourceRow = tuple[str, dict[str, Any]]  # where it stands, for error messages; its keys and values

logger = logging.getLogger("draftsmith")


def list_prompts(config: PromptsConfig, left_out: LeftOut) -> list[Prompt] | None:
    """Return `num_prompts` of the prompts of the config's source, or all; None where the target is to write them.

    Rows that cannot be prompts are counted in `left_out`.
    """
    if config.source == "self_seeded":
        return None
    found = dataset_prompts(config, left_out) if config.source == "dataset" else read_prompts(config, left_out)
    left_out.check(len(found))
    if len(found) < config.num_prompts:
        logger.info("%s holds %d prompts, fewer than num_prompts = %d", config.path, len(found), config.num_prompts)
    return choose_prompts(found, config.num_prompts)


def read_prompts(config: PromptsConfig, left_out: LeftOut) -> list[Prompt]:
    """Return the prompts of a file or a folder in their order."""
    prompts: list[Prompt] = []
    seen: dict[str, Prompt] = {}
    formats = Counter[str]()
    for where, row in read_source(Path(str(config.path)), "prompt file", left_out.add):
        try:
            prompt, format = _read_row(row, config, where)
        except BadRow as error:
            left_out.add(error)
            continue
        prompts.append(prompt)
        formats[format] += 1
    if config.names_a_column and prompts and not formats[COLUMN]:
        raise InputError(f"prompts.field: no row of {config.path} has {config.field!r}; the last has {', '.join(row)}")
    counts = ", ".join(f"{count:,} as {name}" for name, count in formats.most_common())
    logger.info("prompt file %s: read %s", config.path, counts)
    chats = fold_chats(prompts)
    if len(chats) < len(prompts):
        logger.info(
            "%d prompts are the beginnings of chats that others hold whole: they are learnt there", len(prompts) - len(chats)
        )
    return [_named(prompt, seen, config) for prompt in chats]


def _named(prompt: Prompt, seen: dict[str, Prompt], config: PromptsConfig) -> Prompt:
    """Return a prompt under an id of its own: an id that another prompt has is refused, or gets a hash of the content."""
    first = seen.setdefault(prompt.prompt_id, prompt)
    if first == prompt:
        return prompt
    if config.on_bad_row == "refuse":
        used = f"the id {prompt.prompt_id!r} was used in {first.where} for another prompt"
        raise InputError(f"{prompt.where}: {used}; prompts.on_bad_row: skip tells such prompts apart by their content")
    return replace(prompt, prompt_id=f"{prompt.prompt_id}-{hash_of(prompt)}")


def dataset_prompts(config: PromptsConfig, left_out: LeftOut) -> list[Prompt]:
    """Return `num_prompts` prompts of a data set in their order, or all: its rows are drawn by a hash of their numbers."""
    rows = load_rows(str(config.path), config.subset, config.split, revision=config.revision, section="prompts")
    if config.names_a_column and config.field not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise InputError(f"prompts.field: data set {config.path} has no column {config.field!r}; there are {columns}")
    found: dict[int, Prompt] = {}
    for number in sorted(range(len(rows)), key=lambda number: hash_position(f"row-{number}")):
        if len(found) == config.num_prompts:
            break
        row = {**rows[number], "question_id": f"row-{number}"}
        try:
            found[number], _ = _read_row(row, config, f"data set {config.path}, row {number}")
        except BadRow as error:
            left_out.add(error)
    return [prompt for _, prompt in sorted(found.items())]


def _read_row(row: Mapping[str, Any], config: PromptsConfig, where: str) -> tuple[Prompt, str]:
    """Return a row's prompt and its form; a column that the config names goes before what other keys say."""
    if config.template is not None:
        try:
            row = {**row, config.field: config.template.format_map(row)}
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            problem = f"does not fit ({type(error).__name__} {error}); the row has {', '.join(row)}"
            raise BadRow("template", f"prompts.template {config.template!r} {problem}", where) from error
    is_named = config.field in row and (config.names_a_column or config.template is not None)
    format = COLUMN if is_named else detect_format(row, where, "prompts.field", config.field)
    category, columns = config.category or UNCATEGORISED, {"column": config.field, "answer_column": config.answer_field}
    return read_row(row, format, where, **columns, default_category=category, setting="prompts.field"), format


def read_source(path: Path, what: str, bad: OnBadRow = refuse, *, still_written: bool = False) -> Iterator[SourceRow]:
    """Yield the rows of a file, `.gz` or not, or of all files of a folder that have one of `SUFFIXES`, in order of their names.

    Rows of a `.txt` file are its lines that are not blank, as `prompt`. A file with another suffix is read as JSON lines; where
    another program may be adding to it (`still_written`), a last line without its end is left out. `what` is the role of the
    path in error messages, such as `prompt file`; `bad` gets the lines that are no rows.
    """
    if not path.exists():
        raise InputError(f"{what} not found: {path}")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _suffix(file) in SUFFIXES and file.is_file())
        if not files:
            raise InputError(f"{what} {path}: the folder holds no file of {', '.join(SUFFIXES)}")
    rows = chain.from_iterable(_read_file(file, f"{what} {file}", bad, still_written) for file in files)
    first = next(rows, None)
    if first is None:
        raise InputError(f"{what} {path} is empty, or none of its rows can be read")
    yield from chain([first], rows)


def load_rows(path: str, subset: str | None, split: str, *, revision: str | None = None, section: str) -> datasets.Dataset:
    """Open a data set saved by `save_to_disk`, a folder of data files, or one of the Hub, there at a `revision`."""
    try:
        if any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(path)
            rows = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            rows = datasets.load_dataset(path, subset, split=split, revision=revision)
    except KeyError as error:
        raise InputError(f"{section}.split: data set {path} has no split {split!r}; it has {', '.join(loaded)}") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(f"{section}.path: data set {path} could not be loaded: {first_line(error)}") from error
    if not len(rows):
        raise InputError(f"{section}.path: data set {path}, split {split!r}, is empty")
    return rows


def _suffix(path: Path) -> str:
    return path.with_suffix("").suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def _read_file(path: Path, where: str, bad: OnBadRow, still_written: bool) -> Iterator[SourceRow]:
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            if file.peek(len(LFS_POINTER)).startswith(LFS_POINTER):
                raise InputError(f"{where} {IS_POINTER}")
            yield from _rows(file, _suffix(path), where, bad, still_written)
    except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
        raise InputError(f"cannot read {where}: {first_line(error)}") from error


def _rows(file: Any, suffix: str, where: str, bad: OnBadRow, still_written: bool) -> Iterator[SourceRow]:
    if suffix in (".parquet", *DELIMITERS):
        return ((f"{where}, row {number}", row) for number, row in enumerate(_table(file, suffix).to_pylist()))
    if suffix != ".json":
        return _lines(file, suffix == ".txt", where, bad, still_written)
    content = file.read().removeprefix(codecs.BOM_UTF8)
    if content.lstrip().startswith(b"["):
        return _entries(content, where, bad)
    return _lines(io.BytesIO(content), False, where, bad, still_written)


def _table(file: Any, suffix: str) -> pyarrow.Table:
    if suffix == ".parquet":
        return pyarrow.parquet.read_table(file)
    parse = pyarrow.csv.ParseOptions(delimiter=DELIMITERS[suffix], newlines_in_values=True)
    return pyarrow.csv.read_csv(file, parse_options=parse, read_options=pyarrow.csv.ReadOptions(block_size=LONGEST_ROW))


def _lines(file: Iterable[bytes], is_text: bool, where: str, bad: OnBadRow, still_written: bool) -> Iterator[SourceRow]:
    """Yield the lines that are not blank. Bytes split at newlines alone, unlike `str.splitlines`."""
    for number, line in enumerate(file, 1):
        place = f"{where}, line {number}"
        if not (line := line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip():
            continue
        try:
            row = _parsed(line, is_text)
        except BadRow as error:
            if still_written and not line.endswith(b"\n"):
                return
            bad(error.at(place))
            continue
        yield place, row


def _parsed(line: bytes, is_text: bool) -> dict[str, Any]:
    try:
        row = {"prompt": line.decode().strip("\r\n")} if is_text else json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadRow("not_utf8", f"not UTF-8: {error.reason} at byte {error.start} of the line") from error
    except (ValueError, RecursionError) as error:  # the former also of a number of thousands of digits
        raise BadRow("not_json", f"not JSON: {error}") from error
    return _object(row)


def _entries(content: bytes, where: str, bad: OnBadRow) -> Iterator[SourceRow]:
    """Yield the objects of a JSON array."""
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from error
    for number, row in enumerate(rows):
        place = f"{where}, entry {number}"
        try:
            yield place, _object(row)
        except BadRow as error:
            bad(error.at(place))


def _object(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BadRow("not_json", f"expected an object, got {type(row).__name__}")
    return row


def check_readable(prompts: Sequence[Prompt], *, written_here: bool) -> None:
    """Refuse prompts with images or sounds where a server writes the answers."""
    with_media = next((prompt for prompt in prompts if prompt.media), None)
    if with_media is not None and not written_here:
        media = f"prompt {with_media.prompt_id} brings images or sounds, which only the local target reads"
        raise InputError(f"answers.written_by: {media}; set it to target")


def answered_prompts(prompts: Sequence[Prompt], left_out: LeftOut) -> list[Prompt]:
    """Return the prompts that bring an answer; others are counted, or refused."""
    kept = []
    for prompt in prompts:
        if any(turn.answer is not None for turn in turns_of(prompt)):
            kept.append(prompt)
        else:
            found = f"prompt {prompt.prompt_id} brings no answer, and answers.written_by is dataset"
            left_out.add(BadRow("no_answer", found, prompt.where))
    return kept

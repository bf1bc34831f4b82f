"""The prompts of a file, a folder or a data set, and the rows that they are read of.

What a row means is decided by `distill.generation.row_formats`. Rows of JSON and CSV are read here and not by `datasets`, which
gives all rows the keys and types of some, and so would change messages, tools and numbers. A last message by the assistant is
the data set's own answer, used only with `answers.written_by=dataset`.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import json_object
from configs.schema.data import PromptsConfig
from distill.generation.prompts import UNCATEGORISED, Prompt
from distill.generation.row_formats import COLUMN, detect_format, read_row
from heads.frozen.loading import Target

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
MAX_CSV_FIELD = 2**31 - 1  # characters; Python's csv module allows 131,072
SourceRow = tuple[str, dict[str, Any]]  # where it stands, for error messages; its keys and values

logger = logging.getLogger("draftsmith")


def list_prompts(config: PromptsConfig) -> list[Prompt] | None:
    """Return the prompts of the config's source, at most `num_prompts`; None where the target is to write them."""
    if config.source == "self_seeded":
        return None
    found = dataset_prompts(config) if config.source == "dataset" else read_prompts(config)
    first = list(islice(found, config.num_prompts))
    if len(first) < config.num_prompts:
        logger.info("%s holds %d prompts, fewer than num_prompts = %d", config.path, len(first), config.num_prompts)
    return first


def read_prompts(config: PromptsConfig) -> list[Prompt]:
    """Return the prompts of `config.path`, a file or a folder of files, in order."""
    prompts: list[Prompt] = []
    seen: dict[str, Prompt] = {}
    formats = Counter[str]()
    for where, row in read_source(Path(str(config.path)), "prompt file"):
        prompt, format = _read_row(row, config, where)
        first = seen.setdefault(prompt.prompt_id, prompt)
        if first != prompt:
            raise InputError(f"{where}: question_id {prompt.prompt_id!r} was used in {first.where} for another prompt")
        prompts.append(prompt)
        formats[format] += 1
    if config.names_a_column and not formats[COLUMN]:
        raise InputError(
            f"prompts.field: no row of prompt file {config.path} has {config.field!r}; the last has {', '.join(row)}"
        )
    counts = ", ".join(f"{count:,} as {name}" for name, count in formats.most_common())
    logger.info("prompt file %s: read %s", config.path, counts)
    return prompts


def dataset_prompts(config: PromptsConfig) -> Iterator[Prompt]:
    """Yield the prompts of a data set's rows."""
    rows = load_rows(str(config.path), config.subset, config.split, revision=config.revision, section="prompts")
    if config.names_a_column and config.field not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise InputError(f"prompts.field: data set {config.path} has no column {config.field!r}; there are {columns}")
    if not len(rows):
        raise InputError(f"data set {config.path}, split {config.split!r}, is empty")
    for number, row in enumerate(rows):
        yield _read_row({**row, "question_id": f"row-{number}"}, config, f"data set {config.path}, row {number}")[0]


def _read_row(row: Mapping[str, Any], config: PromptsConfig, where: str) -> tuple[Prompt, str]:
    """Return a row's prompt, and the form in which the row has it."""
    setting, format = "prompts.field", ""
    if config.template is not None:
        try:
            row, format = {**row, config.field: config.template.format_map(row)}, COLUMN
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            problem, there = f"{type(error).__name__} {error}", ", ".join(row) or "no key"
            raise InputError(
                f"{where}: prompts.template {config.template!r} does not fit ({problem}); the row has {there}"
            ) from error
    elif config.names_a_column and config.field in row:  # goes before what the other keys say
        format = COLUMN
    format = format or detect_format(row, where, setting, config.field)
    columns = {"column": config.field, "answer_column": config.answer_field}
    category = config.category or UNCATEGORISED
    return read_row(row, format, where, **columns, default_category=category, setting=setting), format


def read_source(path: Path, what: str, *, still_written: bool = False) -> Iterator[SourceRow]:
    """Yield the rows of a file, `.gz` or not, or of all files of a folder that have one of `SUFFIXES`, in order of their names.

    Rows of a `.txt` file are its lines that are not blank, as `prompt`. A file with another suffix is read as JSON lines; where
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
    rows = chain.from_iterable(_read_file(file, f"{what} {file}", still_written) for file in files)
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


def _read_file(path: Path, where: str, still_written: bool) -> Iterator[SourceRow]:
    suffix = _suffix(path)
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            if suffix == ".parquet":
                rows = pyarrow.parquet.read_table(file).to_pylist()
                yield from ((f"{where}, row {number}", row) for number, row in enumerate(rows))
            elif suffix in (".csv", ".tsv"):
                yield from _csv_rows(file.read().decode("utf-8-sig"), "\t" if suffix == ".tsv" else ",", where)
            elif suffix == ".json" and (array := _array(content := file.read(), where)) is not None:
                yield from ((f"{where}, entry {number}", row) for number, row in enumerate(array))
            else:
                yield from _lines(io.BytesIO(content) if suffix == ".json" else file, suffix == ".txt", where, still_written)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, pyarrow.ArrowException, csv.Error) as error:
        raise InputError(f"cannot read {where}: {first_line(error)}") from error


def _lines(file: Iterable[bytes], is_text: bool, where: str, still_written: bool) -> Iterator[SourceRow]:
    """Yield the lines that are not blank. Bytes split at newlines alone, unlike `str.splitlines`."""
    for number, line in enumerate(file, 1):
        place = f"{where}, line {number}"
        if not (line := line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip():
            continue
        try:
            yield place, {"prompt": line.decode().strip("\r\n")} if is_text else json_object(line.decode(), place)
        except (InputError, UnicodeDecodeError):
            if still_written and not line.endswith(b"\n"):
                return
            raise


def _array(content: bytes, where: str) -> list[dict[str, Any]] | None:
    """Return the objects of a JSON array, or the only one of a file; None for what may be lines of an object each."""
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            raise InputError(f"{where} is not JSON: {error}") from error
        return None
    rows = value if isinstance(value, list) else [value]
    if other := [number for number, row in enumerate(rows) if not isinstance(row, dict)]:
        raise InputError(f"{where}, entry {other[0]}: expected an object, got {type(rows[other[0]]).__name__}")
    return rows


def _csv_rows(text: str, delimiter: str, where: str) -> Iterator[SourceRow]:
    csv.field_size_limit(MAX_CSV_FIELD)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names = reader.fieldnames or ()
    if len(set(names)) < len(names):
        raise InputError(f"{where}: line 1 names a column twice: {', '.join(names)}")
    for row in reader:
        if None in row or None in row.values():
            raise InputError(f"{where}, line {reader.line_num}: expected {len(names)} fields as in line 1")
        yield f"{where}, line {reader.line_num}", dict(row)


def check_readable(target: Target, prompts: Sequence[Prompt], *, written_here: bool) -> None:
    """Refuse prompts with images or sounds where a server writes the answers; warn of tools that nothing reads."""
    with_media = next((prompt for prompt in prompts if prompt.media), None)
    if with_media is not None and not written_here:
        raise InputError(
            f"prompt {with_media.prompt_id} brings images or sounds, which only the local target reads: set "
            "answers.written_by to target"
        )
    num_with_tools = sum(bool(prompt.tools) for prompt in prompts)
    if num_with_tools and "tools" not in str(target.tokenizer.chat_template):
        logger.warning("%d prompts bring tools, which the chat template of the target does not read", num_with_tools)


def check_given(prompts: Sequence[Prompt]) -> None:
    """Raise `InputError` where a prompt, which is named, brings no answer."""
    without = [prompt.prompt_id for prompt in prompts if prompt.answer is None]
    if without:
        raise InputError(
            f"answers.written_by is 'dataset', and {len(without)} of {len(prompts)} prompts bring no answer, the first is "
            f"{without[0]}: expected chat messages that end with one by the assistant; correct or leave out those rows, or set "
            "answers.written_by=target"
        )

"""Random access to a file of conversations that need not fit into memory: an index of its rows, which are parsed on access.

The index holds three numbers a row, 16 bytes: its offset in the file and the lengths of prompt and answer. It is made in one
pass, in which every row is checked as `distill.dataset.conversations.read_conversations` checks it, and kept beside the file
with the file's SHA-256; while that stays the same, later runs read the index instead. In a folder that cannot be written each
run makes it anew. Several processes may make it at once: the bytes are the same, and it is renamed into place.

(Arrow files through `datasets` would hold the data twice, and coerce wrong values instead of refusing them with their line.)
N rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from configs.runtime.errors import InputError
from configs.runtime.files import json_object, sha256_of, write_bytes
from distill.dataset.conversations import Conversation

log = logging.getLogger("draftsmith")

WHAT = "conversations file"
SUFFIX = ".index.safetensors"
FORMAT_VERSION = 1
DTYPES = {"offsets": np.int64, "prompt_lengths": np.int32, "answer_lengths": np.int32}


@dataclass(frozen=True, kw_only=True)
class Index:
    """Where the rows of a file lie, and how long they are.

    Args:
        offsets: first byte of each row, int64 `[N]`.
        prompt_lengths: tokens, int32 `[N]`.
        answer_lengths: tokens, int32 `[N]`.
    """

    offsets: np.ndarray
    prompt_lengths: np.ndarray
    answer_lengths: np.ndarray


class ConversationFile(Sequence[Conversation]):
    """The rows of a `train.jsonl` or `held_out.jsonl` in file order; made by `open_conversations`.

    It holds no open file, so that forked processes do not share a file position.
    """

    def __init__(self, path: Path, index: Index) -> None:
        self.path, self.places = path, index

    def __len__(self) -> int:
        return len(self.places.offsets)

    @overload
    def __getitem__(self, place: int) -> Conversation: ...
    @overload
    def __getitem__(self, place: slice) -> list[Conversation]: ...
    def __getitem__(self, place: int | slice) -> Conversation | list[Conversation]:
        """Read a row, or several.

        Raises:
            IndexError: there is no such row.
            InputError: the file cannot be read, or is no longer the one that was opened.
        """
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        offset = int(self.places.offsets[place])
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                line = file.readline()
        except OSError as error:
            raise InputError(f"cannot read {WHAT} {self.path}: {error.strerror or error}") from error
        lengths = (int(self.places.prompt_lengths[place]), int(self.places.answer_lengths[place]))
        return self._parsed(line, offset, lengths)

    def _parsed(self, line: bytes, offset: int, lengths: tuple[int, int]) -> Conversation:
        where = f"{WHAT} {self.path}, byte {offset}"
        try:
            row = Conversation.from_dict(json_object(line, where), where)
        except InputError as error:
            raise InputError(f"{error}; the file was changed since it was opened: start again") from error
        if (len(row.prompt_ids), len(row.answer_ids)) != lengths:
            raise InputError(f"{where}: another conversation than when the file was opened; it was changed: start again")
        return row


def open_conversations(path: Path) -> ConversationFile:
    """Open a conversations file by its index, which is made where there is none of this file.

    Raises:
        InputError: the file is missing or empty, or a line (named) is not a conversation.
    """
    if not path.is_file():
        raise InputError(f"{WHAT} not found: {path}")
    sha256 = sha256_of(path)
    kept = path.with_name(path.name + SUFFIX)
    index = _read_index(kept, sha256)
    if index is None:
        index = _make_index(path)
        _keep(kept, index, sha256)
    return ConversationFile(path, index)


def row_lengths(conversations: Sequence[Conversation]) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of prompts and answers in tokens, int32 `[N]`; without reading the rows of a `ConversationFile`."""
    if isinstance(conversations, ConversationFile):
        return conversations.places.prompt_lengths, conversations.places.answer_lengths
    prompts = np.fromiter((len(row.prompt_ids) for row in conversations), np.int32, len(conversations))
    return prompts, np.fromiter((len(row.answer_ids) for row in conversations), np.int32, len(conversations))


def _read_index(path: Path, sha256: str) -> Index | None:
    """Return the index kept for a file of this hash, None where there is none that can be used."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            if file.metadata() != _metadata(sha256):
                return None
            parts = {name: file.get_slice(name) for name in DTYPES}
            if any(part.get_dtype() != f"I{8 * np.dtype(DTYPES[name]).itemsize}" for name, part in parts.items()):
                return None
            columns = {name: file.get_tensor(name) for name in DTYPES}
    except (SafetensorError, OSError) as error:
        log.info("index %s cannot be read (%s) and is made anew", path, error)
        return None
    return Index(**columns) if {column.shape for column in columns.values()} == {(columns["offsets"].size,)} else None


def _make_index(path: Path) -> Index:
    """Read a file from beginning to end, one line at a time; see `open_conversations`."""
    columns = np.fromiter(_places(path), np.dtype(list(DTYPES.items())))
    if not len(columns):
        raise InputError(f"{WHAT} {path} is empty")
    return Index(**{name: np.ascontiguousarray(columns[name]) for name in DTYPES})


def _places(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yield first byte and lengths of each row."""
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{WHAT} {path}, line {number}"
                    row = Conversation.from_dict(json_object(line, where), where)
                    yield offset, len(row.prompt_ids), len(row.answer_ids)
                offset += len(line)
    except OSError as error:
        raise InputError(f"cannot read {WHAT} {path}: {error.strerror or error}") from error


def _keep(path: Path, index: Index, sha256: str) -> None:
    columns: dict[str, Any] = {name: getattr(index, name) for name in DTYPES}
    try:
        write_bytes(path, save(columns, metadata=_metadata(sha256)))
    except InputError as error:
        log.info("%s: every run will make the index of its conversations anew", error)


def _metadata(sha256: str) -> dict[str, str]:
    return {"index": f"format {FORMAT_VERSION} of data {sha256}"}  # a single entry: safetensors writes several in any order

"""Conversations on disk: a row, the file of rows, and the manifest beside it.

Training reads the token ids, never the text, which encoded again may come back as other tokens than the target chose. A file
need not fit into memory: opening it checks every row in one pass, and keeps the offset and the lengths of each. (Arrow files
through `datasets` would hold the data twice, and coerce wrong values instead of refusing them with their line.) N rows.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, overload

import numpy as np
from pydantic import AfterValidator, BaseModel, Field, Strict, TypeAdapter, ValidationError

from configs.runtime.errors import InputError, first_finding
from configs.runtime.files import read_json
from heads.frozen.identity import TargetIdentity
from heads.frozen.media import MediaPrompt
from heads.frozen.tokenizer import SOUND

WHAT = "conversations file"
COLUMNS = {"offsets": np.int64, "prompt_lengths": np.int32, "answer_lengths": np.int32, "user_texts": np.int64}
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
WRITTEN_BY = "answers_written_by"  # key of the manifest

Message = dict[str, Any]  # {"role": ..., "content": ...}, and of some what a chat template reads besides, such as tool calls


def _with_role_and_content(message: Message) -> Message:
    if not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise ValueError("a message needs role and content, both texts")
    return message


Count = Annotated[int, Strict(), Field(ge=0)]
TokenIds = Annotated[tuple[Count, ...], Field(min_length=1)]
Messages = tuple[Annotated[Message, AfterValidator(_with_role_and_content)], ...]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One answered turn. A prompt of several turns gives one of these for each, all with the same `prompt_id`."""

    prompt_id: str
    category: str
    turn: Count  # which of the prompt's turns is answered
    messages: Messages  # ends with the assistant's answer
    prompt_ids: TokenIds  # everything the target read, chat template included
    answer_ids: TokenIds  # everything the target wrote, its end-of-text token included
    ended: Annotated[bool, Strict()]  # False: cut off at the longest length allowed
    tools: tuple[dict[str, Any], ...] = ()  # that the assistant may call
    media_prompt: MediaPrompt | None = None  # of a prompt with images or sounds, whose places are in `prompt_ids`

    def to_line(self) -> str:
        """Return the row as one line of JSON, all but ASCII escaped: some readers end a line at U+2028."""
        values = {name: value for name, value in asdict(self).items() if value or name not in ("tools", "media_prompt")}
        return json.dumps(values) + "\n"

    @property
    def user_text(self) -> str:
        """Everything the user says, one message a line, and after it the names of the images and sounds in it."""
        said = [message["content"] for message in self.messages if message["role"] == "user"]
        return "\n".join([*said, *media_names(() if self.media_prompt is None else self.media_prompt.media)])

    @classmethod
    def from_dict(cls, values: Any) -> Conversation:
        """Return a row from what `asdict` made of it."""
        return _ROW.validate_python(values)


_ROW = TypeAdapter(Conversation)


def read_row(line: bytes, where: str) -> Conversation:
    """Read a row back; `where` names the file and line in errors."""
    try:
        return _ROW.validate_json(line)
    except ValidationError as error:
        raise InputError(f"{where}: {first_finding(error, 'row')}") from error


def read_conversations(path: Path) -> list[Conversation]:
    rows = [row for _, row in _read_rows(path)]
    if not rows:
        raise InputError(f"{WHAT} {path} is empty")
    return rows


class Index(NamedTuple):
    """What is known of conversations without reading their rows."""

    offsets: np.ndarray  # int64 [N], the first byte of each row
    prompt_lengths: np.ndarray  # int32 [N], in tokens
    answer_lengths: np.ndarray  # int32 [N], in tokens
    user_texts: np.ndarray  # int64 [N], `text_hash` of what the user says
    answer_counts: np.ndarray  # int64, how often each token id, up to the largest, stands in an answer


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
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        offset = int(self.places.offsets[place])
        where = f"{WHAT} {self.path}, byte {offset}"
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                row = read_row(file.readline(), where)
        except OSError as error:
            raise InputError(f"cannot read {WHAT} {self.path}: {error.strerror or error}") from error
        except InputError as error:
            raise InputError(f"{error}; the file was changed since it was opened: start again") from error
        if (len(row.prompt_ids), len(row.answer_ids)) != (self.places.prompt_lengths[place], self.places.answer_lengths[place]):
            raise InputError(f"{where}: another conversation than when the file was opened; it was changed: start again")
        return row


def open_conversations(path: Path) -> ConversationFile:
    """Check every row of a conversations file, and open it."""
    index = _index(_read_rows(path))
    if not len(index.offsets):
        raise InputError(f"{WHAT} {path} is empty")
    return ConversationFile(path, index)


def index_of(conversations: Sequence[Conversation]) -> Index:
    """Return the index of conversations, which a `ConversationFile` has; the offsets of others mean nothing."""
    return conversations.places if isinstance(conversations, ConversationFile) else _index((0, row) for row in conversations)


def media_names(media: Sequence[str]) -> list[str]:
    """Return a short name of each image or sound, by its reference."""
    kinds = ("sound" if reference.startswith(SOUND) else "image" for reference in media)
    return [f"{kind} {text_hash(reference) % 2**64:x}" for kind, reference in zip(kinds, media, strict=True)]


def check_held_out(train: Sequence[Conversation], held_out: Sequence[Conversation]) -> None:
    shared = np.isin(index_of(held_out).user_texts, index_of(train).user_texts)
    if shared.any():
        first = held_out[int(shared.argmax())].prompt_id
        found = f"{shared.sum()} of its {len(shared)} conversations ask what data.train asks, prompt {first} for one"
        raise InputError(f"data.held_out: {found}; give the two files that scripts/data.py writes")


def text_hash(text: str) -> int:
    """Return the first 64 bits of a text's SHA-256 as a signed number; white space and case make no difference."""
    digest = hashlib.sha256(folded_text(text).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def folded_text(text: str) -> str:
    """Return a text as it is compared: white space folded, case ignored."""
    return " ".join(text.split()).casefold()


class DataManifest(BaseModel):
    """What this project reads of the manifest beside a conversations file."""

    format_version: Literal[1]
    target: dict[str, Any] | None = None  # heads.frozen.identity.TargetIdentity
    answers_written_by: str = "target"  # "target", "server" (the target on one), or "dataset"
    counts: dict[str, Any] = {}  # of each side, by the stem of its file


def check_written_for(path: Path, identity: TargetIdentity) -> list[str]:
    """Compare the target that wrote a conversations file, named in the manifest beside it, with the one at hand.

    Return what differs and is still usable: answers of other weights are only worse training data, and those of another
    tokenizer are refused.
    """
    writer = TargetIdentity.from_dict(target_of(path), str(path.parent / MANIFEST))
    differences = writer.differences(identity)
    if "tokenizer" in differences:
        others = f"whose tokenizer is not that of target {identity.name}"
        raise InputError(f"{path} was written by {writer.name}, {others}: make the data again with this target")
    return differences


def target_of(path: Path) -> dict[str, Any]:
    return _read_manifest(path).target or {}


def first_answers(path: Path, max_tokens: int, asked: Iterable[str] = ()) -> list[tuple[int, ...]]:
    """Return the first answers of a conversations file that have no more tokens together, without those to what is `asked`."""
    rows = open_conversations(path)
    lengths_N, user_texts_N = rows.places.answer_lengths, rows.places.user_texts
    unseen_N = ~np.isin(user_texts_N, np.array([text_hash(text) for text in asked], np.int64))
    known_N = unseen_N & (np.cumsum(np.where(unseen_N, lengths_N, 0)) <= max_tokens)
    return [rows[number].answer_ids for number in np.flatnonzero(known_N).tolist()]


def is_written_by_target(path: Path) -> bool:
    """Return whether the answers in a conversations file are a target's, here or on a server, by the manifest beside it."""
    return _read_manifest(path).answers_written_by != "dataset"


def describe_data(path: Path) -> dict[str, Any]:
    """Return what the manifest beside a conversations file counts in it; nothing where there is no manifest (any more)."""
    if not (path.parent / MANIFEST).is_file():
        return {}
    counts = _read_manifest(path).counts.get(path.stem, {})
    return dict(counts) if isinstance(counts, dict) else {}


def _index(rows: Iterable[tuple[int, Conversation]]) -> Index:
    counts: Counter[int] = Counter()

    def places() -> Iterator[tuple[int, int, int, int]]:
        for offset, row in rows:
            counts.update(row.answer_ids)
            yield offset, len(row.prompt_ids), len(row.answer_ids), text_hash(row.user_text)

    columns = np.fromiter(places(), np.dtype(list(COLUMNS.items())))
    counted = np.zeros(max(counts, default=-1) + 1, np.int64)
    counted[list(counts)] = list(counts.values())
    return Index(**{name: np.ascontiguousarray(columns[name]) for name in COLUMNS}, answer_counts=counted)


def _read_rows(path: Path) -> Iterator[tuple[int, Conversation]]:
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield offset, read_row(line, f"{WHAT} {path}, line {number}")
                offset += len(line)
    except FileNotFoundError as error:
        raise InputError(f"{WHAT} not found: {path}") from error
    except OSError as error:
        raise InputError(f"cannot read {WHAT} {path}: {error.strerror or error}") from error


def _read_manifest(path: Path) -> DataManifest:
    manifest = path.parent / MANIFEST
    try:
        return DataManifest.model_validate(read_json(manifest, "data manifest"))
    except ValidationError as error:
        raise InputError(f"data manifest {manifest}: {first_finding(error, 'content')}; make the data again") from error

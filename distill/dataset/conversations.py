"""Conversations on disk: a row, the file of rows, and the manifest beside it.

Training reads the token ids, never the text, which encoded again may come back as other tokens than the target chose. A file
need not fit into memory: opening it checks every row in one pass, and keeps the offset and the lengths of each. (Arrow files
through `datasets` would hold the data twice, and coerce wrong values instead of refusing them with their line.)
N rows, A answers, of which a row has one or several.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, overload

import numpy as np
from pydantic import AfterValidator, BaseModel, Field, Strict, TypeAdapter, ValidationError

from configs.runtime.errors import InputError, first_finding
from configs.runtime.files import read_json
from heads.frozen.identity import TargetIdentity
from heads.frozen.media import MediaPrompt
from heads.frozen.tokenizer import OBJECT, SOUND

WHAT = "conversations file"
ASKING = ("user", "tool", "function", "ipython")  # roles whose messages are answered: the user, and results of tools
COLUMNS = {"offsets": np.int64, "rows": np.int32, "starts": np.int32, "ends": np.int32, "user_texts": np.int64}
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
WRITTEN_BY = "answers_written_by"  # key of the manifest

Message = dict[str, Any]  # {"role": ..., "content": ...}, and of some what a chat template reads besides, such as tool calls


def _with_role_and_content(message: Message) -> Message:
    if not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise ValueError("a message needs role and content, both texts")
    return message


Count = Annotated[int, Strict(), Field(ge=0)]
Span = tuple[Count, Count]  # the first place of some token ids, and the place after their last
TokenIds = Annotated[tuple[Count, ...], Field(min_length=1)]
Messages = tuple[Annotated[Message, AfterValidator(_with_role_and_content)], ...]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One answered turn, with the answers before it that are learnt in the same row.

    A chat of several turns gives one of these for each, all with the same `prompt_id`; `share_rows` joins those to train on.
    """

    prompt_id: str
    category: str
    turn: Count  # which of the prompt's turns is answered
    messages: Messages  # ends with the assistant's answer
    prompt_ids: TokenIds  # everything the target read, chat template included
    answer_ids: TokenIds  # everything the target wrote, its end-of-text token included
    ended: Annotated[bool, Strict()]  # False: cut off at the longest length allowed
    tools: tuple[dict[str, Any], ...] = ()  # that the assistant may call
    of_ids: Annotated[bool, Strict()] = False  # its messages are spelled in token ids
    media_prompt: MediaPrompt | None = None  # of a prompt with images or sounds, whose places are in `prompt_ids`
    earlier: tuple[Span, ...] = ()  # where answers to the turns just before lie in `prompt_ids`, if they are learnt here

    def __post_init__(self) -> None:
        edges = [0, *(edge for span in self.earlier for edge in span)]
        if edges != sorted(set(edges)) or edges[-1] > len(self.prompt_ids):
            raise ValueError("earlier: must be spans of prompt_ids after its first token, in order")
        if self.earlier and len(answer_places(self.messages)) <= len(self.earlier):
            raise ValueError("earlier: has as many spans as messages has answers, or more")

    def to_line(self) -> str:
        """Return the row as one line of JSON, all but ASCII escaped: some readers end a line at U+2028."""
        optional = ("tools", "of_ids", "media_prompt", "earlier")
        values = {name: value for name, value in asdict(self).items() if value or name not in optional}
        return json.dumps(values) + "\n"

    @property
    def spans(self) -> tuple[Span, ...]:
        """Where the answers that are learnt lie in `prompt_ids + answer_ids`, the row's own last."""
        return *self.earlier, (len(self.prompt_ids), len(self.prompt_ids) + len(self.answer_ids))

    @property
    def answers(self) -> list[tuple[int, ...]]:
        """The token ids of the answers that are learnt."""
        ids = self.prompt_ids + self.answer_ids
        return [ids[start:end] for start, end in self.spans]

    @property
    def user_text(self) -> str:
        """Everything the user says, one message a line, and after it the names of the images and sounds in it."""
        return self._said_in(self.messages)

    @property
    def user_texts(self) -> list[str]:
        """What the user had said, as in `user_text`, before each answer that is learnt."""
        places = answer_places(self.messages)[:-1]
        before = places[len(places) - len(self.earlier) :]
        return [*(self._said_in(self.messages[:place]) for place in before), self.user_text]

    def _said_in(self, messages: Sequence[Message]) -> str:
        said = [message["content"] for message in messages if message["role"] == "user"]
        media = () if self.media_prompt is None else self.media_prompt.media
        return "\n".join([*said, *media_names(media[: "".join(said).count(OBJECT)])])

    def continues(self, other: Conversation) -> bool:
        """Return whether this is the next turn, and its prompt begins with all that the target read and wrote in `other`."""
        before = other.prompt_ids + other.answer_ids
        return self.turn == other.turn + 1 and self.prompt_ids[: len(before)] == before

    @classmethod
    def from_dict(cls, values: Any) -> Conversation:
        """Return a row from what `asdict` made of it."""
        return _ROW.validate_python(values)


_ROW = TypeAdapter(Conversation)


def share_rows(turns: Iterable[Conversation]) -> list[Conversation]:
    """Return the answered turns of a chat in as few rows as teach the same.

    A turn whose prompt goes on from the answer before it, as the chat template writes it, takes that turn into its row; where
    the template writes an earlier answer otherwise than it was generated, the turn keeps a row of its own, as it was served.
    """
    rows: list[Conversation] = []
    for turn in turns:
        joins = rows and turn.continues(rows[-1])
        rows.append(replace(turn, earlier=rows.pop().spans) if joins else turn)
    return rows


def answer_places(messages: Sequence[Message]) -> list[int]:
    """Return the places of the messages by which the assistant answers (`ASKING`)."""
    roles = [message["role"] for message in messages]
    return [place for place in range(1, len(roles)) if roles[place] == "assistant" and roles[place - 1] in ASKING]


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
    rows: np.ndarray  # int32 [A], rising: the row that each answer stands in
    starts: np.ndarray  # int32 [A], the place of its first token there
    ends: np.ndarray  # int32 [A], the place after its last one
    user_texts: np.ndarray  # int64 [A], `text_hash` of what the user had said before it
    answer_counts: np.ndarray  # int64, how often each token id, up to the largest, stands in an answer

    @property
    def lengths(self) -> np.ndarray:
        """Return the tokens of each row, int32 `[N]`."""
        return self.ends[np.diff(self.rows, append=-1) != 0]

    def spans(self, row: int) -> list[tuple[int, int]]:
        """Return where the answers of a row lie in it."""
        own = slice(*np.searchsorted(self.rows, [row, row + 1]))
        return list(zip(self.starts[own].tolist(), self.ends[own].tolist(), strict=True))

    def by_row(self, max_length: int = 2**31 - 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, int32 `[N]` each, up to where rows have answers within `max_length` tokens (0: they have none), where the
        last one of these begins, and how many tokens they have together.
        """
        kept_A = self.starts < max_length
        rows_A, starts_A, ends_A = self.rows[kept_A], self.starts[kept_A], np.minimum(self.ends[kept_A], max_length)
        ends_N, starts_N = np.zeros((2, len(self.offsets)), np.int32)
        ends_N[rows_A], starts_N[rows_A] = ends_A, starts_A  # of a row's answers the last one stays
        return ends_N, starts_N, np.bincount(rows_A, ends_A - starts_A, len(self.offsets)).astype(np.int32)

    def asking(self, texts: Collection[int] | np.ndarray) -> np.ndarray:
        """Return which rows have an answer to one of these texts, by their hashes, bool `[N]`."""
        found_N = np.zeros(len(self.offsets), bool)
        found_N[self.rows[np.isin(self.user_texts, np.fromiter(texts, np.int64))]] = True
        return found_N


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
        place = range(len(self))[place]
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
        if list(row.spans) != self.places.spans(place):
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
    shared = index_of(held_out).asking(index_of(train).user_texts)
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
    *_, num_tokens_N = rows.places.by_row()
    unseen_N = ~rows.places.asking([text_hash(text) for text in asked])
    known_N = unseen_N & (np.cumsum(np.where(unseen_N, num_tokens_N, 0)) <= max_tokens)
    return [answer for number in np.flatnonzero(known_N).tolist() for answer in rows[number].answers]


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

    def places() -> Iterator[tuple[int, int, int, int, int]]:
        for number, (offset, row) in enumerate(rows):
            for answer, (start, end), text in zip(row.answers, row.spans, row.user_texts, strict=True):
                counts.update(answer)
                yield offset, number, start, end, text_hash(text)

    table = np.fromiter(places(), np.dtype(list(COLUMNS.items())))
    columns = {name: np.ascontiguousarray(table[name]) for name in COLUMNS}
    columns["offsets"] = columns["offsets"][np.diff(columns["rows"], prepend=-1) > 0]
    counted = np.zeros(max(counts, default=-1) + 1, np.int64)
    counted[list(counts)] = list(counts.values())
    return Index(**columns, answer_counts=counted)


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

"""Conversations, written by the target unless the manifest says otherwise: the row that lies on disk, and reading it back.

Training reads the token ids, never the text: text decoded and encoded again may come back as other tokens than those the
target chose. The text of the messages is there for people.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.files import read_json, read_jsonl
from heads.target.identity import TargetIdentity

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
# In the manifest: "target", also where it says nothing, "server" (the target on one), or "dataset".
WRITTEN_BY = "answers_written_by"

Message = dict[str, str]  # {"role": ..., "content": ...}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One answered turn. A prompt of several turns gives one of these for each, all with the same `prompt_id`."""

    prompt_id: str
    category: str
    turn: int  # which of the prompt's turns is answered, from 0
    messages: tuple[Message, ...]  # ends with the assistant's answer
    prompt_ids: tuple[int, ...]  # everything the target read, chat template included
    answer_ids: tuple[int, ...]  # everything the target wrote, its end-of-text token included
    ended: bool  # False: the answer was cut off at the longest length allowed

    def to_line(self) -> str:
        """Return the row as one line of JSON.

        All but ASCII is escaped: a raw U+2028 in an answer would end the line for readers that split at Unicode line breaks.
        """
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> Conversation:
        """Read back one row; `where` names the file and line in the complaint.

        Raises:
            InputError: a field is missing or of the wrong type, or there are no prompt or answer tokens.
        """
        for name, check, accepted in _FIELDS:
            if name not in values:
                raise InputError(f"{where}: the conversation has no {name!r}; make the data again with scripts/make_data.py")
            if not check(values[name]):
                raise InputError(f"{where}: {name!r} must be {accepted}, got {str(values[name])[:60]!r}")
        return cls(
            prompt_id=values["prompt_id"],
            category=values["category"],
            turn=values["turn"],
            messages=tuple(values["messages"]),
            prompt_ids=tuple(values["prompt_ids"]),
            answer_ids=tuple(values["answer_ids"]),
            ended=values["ended"],
        )


def read_conversations(path: Path) -> list[Conversation]:
    """Return the rows of a `train.jsonl` or `held_out.jsonl` in file order.

    Raises:
        InputError: the file is missing or empty, or a line (named) is not a conversation.
    """
    what = "conversations file"
    return [Conversation.from_dict(values, f"{what} {path}, line {line}") for line, values in read_jsonl(path, what)]


def check_written_for(path: Path, identity: TargetIdentity) -> list[str]:
    """Compare the target that wrote a conversations file, named in the manifest beside it, with the one at hand.

    Returns:
        What differs and is still usable, in words: answers of other weights are only worse training data.

    Raises:
        InputError: there is no manifest, or the token ids mean something else to this target.
    """
    writer = TargetIdentity.from_dict(_read_manifest(path).get("target") or {}, str(path.parent / MANIFEST))
    differences = writer.differences(identity)
    if "tokenizer" in differences:
        raise InputError(
            f"{path} was written by {writer.name}, whose tokenizer is not that of target {identity.name}: "
            "make the data again with this target"
        )
    return differences


def is_written_by_target(path: Path) -> bool:
    """Return whether the answers in a conversations file are a target's, here or on a server, by the manifest beside it.

    Raises:
        InputError: there is no manifest of this format version.
    """
    return _read_manifest(path).get(WRITTEN_BY, "target") in ("target", "server")


def count_answer_tokens(conversations: Iterable[Conversation]) -> int:
    """Return how many tokens the answers have in all."""
    return sum(len(conversation.answer_ids) for conversation in conversations)


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest beside a conversations file."""
    manifest = path.parent / MANIFEST
    content = read_json(manifest, "data manifest")
    if not isinstance(content, dict) or content.get("format_version") != FORMAT_VERSION:
        raise InputError(f"data manifest {manifest}: format_version must be {FORMAT_VERSION}; make the data again")
    return content


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_count, value))


def _is_messages(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and _is_text(message.get("role")) and _is_text(message.get("content")) for message in value
    )


_FIELDS = (
    ("prompt_id", _is_text, "a text"),
    ("category", _is_text, "a text"),
    ("turn", _is_count, "a whole number from 0"),
    ("messages", _is_messages, "a list of {role, content}"),
    ("prompt_ids", _is_token_ids, "a list of token ids, at least one"),
    ("answer_ids", _is_token_ids, "a list of token ids, at least one"),
    ("ended", lambda value: isinstance(value, bool), "true or false"),
)

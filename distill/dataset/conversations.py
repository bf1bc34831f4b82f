"""A row of the training data on disk, reading it back, and the manifest beside it.

Training reads the token ids, never the text: text decoded and encoded again may come back as other tokens than those the
target chose. The text of the messages is for people.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, Strict, TypeAdapter, ValidationError

from configs.runtime.errors import InputError
from configs.runtime.files import read_json, read_jsonl
from heads.target.identity import TargetIdentity

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
WRITTEN_BY = "answers_written_by"  # key of the manifest

Message = dict[str, str]  # {"role": ..., "content": ...}


def _with_role_and_content(message: Message) -> Message:
    if not {"role", "content"} <= set(message):
        raise ValueError("a message needs role and content")
    return message


# What a field must be, in words, is its description.
Text = Annotated[str, Field(description="a text")]
Count = Annotated[int, Strict(), Field(ge=0)]
TokenIds = Annotated[tuple[Count, ...], Field(min_length=1, description="a list of token ids, at least one")]
Messages = Annotated[
    tuple[Annotated[Message, AfterValidator(_with_role_and_content)], ...], Field(description="a list of {role, content}")
]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One answered turn. A prompt of several turns gives one of these for each, all with the same `prompt_id`."""

    prompt_id: Text
    category: Text
    turn: Annotated[Count, Field(description="a whole number from 0")]  # which of the prompt's turns is answered
    messages: Messages  # ends with the assistant's answer
    prompt_ids: TokenIds  # everything the target read, chat template included
    answer_ids: TokenIds  # everything the target wrote, its end-of-text token included
    ended: Annotated[bool, Strict(), Field(description="true or false")]  # False: cut off at the longest length allowed

    def to_line(self) -> str:
        """Return the row as one line of JSON.

        All but ASCII is escaped: a raw U+2028 in an answer would end the line for readers that split at Unicode line breaks.
        """
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> Conversation:
        """Read back one row; `where` names the file and line in errors.

        Raises:
            InputError: a field is missing or of the wrong type, or there are no prompt or answer tokens.
        """
        try:
            return _ROW.validate_python(values)
        except ValidationError as error:
            finding = error.errors(include_url=False)[0]
            name = str(finding["loc"][0])
        if finding["type"] == "missing":
            raise InputError(f"{where}: the conversation has no {name!r}; make the data again with scripts/make_data.py")
        accepted = _ROW.json_schema()["properties"][name]["description"]
        raise InputError(f"{where}: {name!r} must be {accepted}, got {str(values[name])[:60]!r}")


_ROW = TypeAdapter(Conversation)


class DataManifest(BaseModel):
    """What this project reads of the manifest beside a conversations file."""

    format_version: Literal[1]
    target: dict[str, Any] | None = None  # heads.target.identity.TargetIdentity
    answers_written_by: str = "target"  # "target", "server" (the target on one), or "dataset"


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
        What differs and is still usable: answers of other weights are only worse training data.

    Raises:
        InputError: there is no manifest, or the token ids mean something else to this target.
    """
    writer = TargetIdentity.from_dict(_read_manifest(path).target or {}, str(path.parent / MANIFEST))
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
    return _read_manifest(path).answers_written_by in ("target", "server")


def count_answer_tokens(conversations: Iterable[Conversation]) -> int:
    """Return how many tokens the answers have in all."""
    return sum(len(conversation.answer_ids) for conversation in conversations)


def _read_manifest(path: Path) -> DataManifest:
    """Return the manifest beside a conversations file."""
    manifest = path.parent / MANIFEST
    try:
        return DataManifest.model_validate(read_json(manifest, "data manifest"))
    except ValidationError as error:
        finding = error.errors(include_url=False)[0]
        key = ".".join(map(str, finding["loc"])) or "content"
        wrong = (
            f"format_version must be {FORMAT_VERSION}" if key in ("format_version", "content") else f"{key}: {finding['msg']}"
        )
        raise InputError(f"data manifest {manifest}: {wrong}; make the data again") from error

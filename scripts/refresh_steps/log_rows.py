"""Rows of a log of served conversations, with what stands beside them: when each was served.

Files that prompts are read from (`distill.generation.source_files`), and the log that vLLM prints, whose prompts are texts in
the target's chat template or their token ids, and become messages again where those give the same text.
"""

from __future__ import annotations

import ast
import gzip
import re
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from configs.runtime.errors import InputError, first_line
from configs.runtime.redaction import redact
from configs.schema.commands.refreshing import LogConfig
from configs.schema.target import TargetConfig
from distill.generation.row_formats import KEYS
from distill.generation.source_files import SUFFIXES, read_source
from heads.frozen.checkpoint_files import UNREADABLE
from heads.frozen.identity import locate
from heads.frozen.tokenizer import load_tokenizer, no_chat_template

WHAT = "log"
VLLM_NAME = re.compile(r"\.log(?:[.-][\d-]+)?(?:\.gz)?$")  # server.log, and server.log.1 or server.log-20260101.gz of rotation
TIME_KEYS = ("time", "timestamp", "created", "created_at", "ts")
AROUND = ("request", "body", "response")  # sections of a row that may hold its time
MILLISECONDS_FROM = 1e11  # in seconds a time in the sixth millennium
TEXT = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|None"
REQUEST = re.compile(
    r"(?P<date>\d\d-\d\d \d\d:\d\d:\d\d)\b.*?\b(?:Received request|Request) \S+?(?: details)?: "
    rf"prompt: (?P<text>{TEXT}),(?:.*?\bprompt_token_ids: \[(?P<ids>[\d, ]*)\])?"
)
SYSTEM, USER, ASSISTANT, AGAIN = "SystemSaid", "UserSaid", "AssistantSaid", "UserSaidAgain"  # marks in a rendered template


def log_rows(log: LogConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where each row of the log stands, for messages, and its keys and values.

    Args:
        log: the settings.
        tokenizer: of the target, with a chat template.

    Raises:
        InputError: there is no log, it is empty or cannot be read, or one of vLLM's holds no request with its prompt.
    """
    path = Path(log.path)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    printed = [each for each in files if VLLM_NAME.search(each.name) and each.is_file()]
    if printed:
        reader = ChatReader(tokenizer)
        for file in printed:
            yield from _vllm_rows(file, reader)
    if not printed or any(each.name.removesuffix(".gz").endswith(SUFFIXES) for each in files):
        yield from read_source(path, WHAT, still_written=True)


def served_at(row: Mapping[str, Any], field: str | None) -> datetime | None:
    """Return when a row was served, None where it does not say."""
    sections = [row, *(row[key] for key in AROUND if isinstance(row.get(key), Mapping))]
    keys = TIME_KEYS if field is None else (field,)
    values = (section[key] for section in sections for key in keys if section.get(key) is not None)
    return next((time for value in values if (time := _time(value)) is not None), None)


class ChatReader:
    """Finds the messages of a conversation in its text in a tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        user, again = {"role": "user", "content": USER}, {"role": "user", "content": AGAIN}
        self._before, _, self._after = self._render([user]).partition(USER)
        longer = self._render([user, {"role": "assistant", "content": ASSISTANT}, again])
        self._to_assistant, _, rest = longer.partition(USER)[2].partition(ASSISTANT)
        self._to_user = rest.partition(AGAIN)[0]
        self._before_system, _, rest = self._render([{"role": "system", "content": SYSTEM}, user]).partition(SYSTEM)
        self._from_system = rest.partition(USER)[0]

    def messages(self, text: str) -> list[dict[str, str]] | None:
        """Return the messages that the template makes this text of; None where none were found that do."""
        text = text.rstrip()
        candidates: list[tuple[list[dict[str, str]], str]] = []
        if self._from_system and text.startswith(self._before_system):
            system, _, rest = text.removeprefix(self._before_system).partition(self._from_system)
            candidates.append(([{"role": "system", "content": system}], rest))
        if text.startswith(self._before):
            candidates.append(([], text.removeprefix(self._before)))
        for first, rest in candidates:
            found = [*first, *self._turns(rest.removesuffix(self._after.rstrip()))]
            if self._render(found).rstrip() == text:
                return found
        return None

    def _turns(self, text: str) -> Iterator[dict[str, str]]:
        for part in text.split(self._to_user) if self._to_user else [text]:
            user, _, assistant = part.partition(self._to_assistant) if self._to_assistant else (part, "", "")
            yield {"role": "user", "content": user}
            if assistant:
                yield {"role": "assistant", "content": assistant}

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except TemplateError:  # some know no system message
            return ""


def chat_tokenizer(target: TargetConfig) -> PreTrainedTokenizerBase:
    """Return the target's tokenizer; an InputError where it cannot be read or has no chat template."""
    try:
        tokenizer = load_tokenizer(locate(target), target)
    except UNREADABLE as error:
        raise InputError(f"target.name: {target.name} has no tokenizer that can be read: {first_line(error)}") from error
    if tokenizer.chat_template is None:
        raise InputError(no_chat_template(redact(target.name)))
    return tokenizer


def _vllm_rows(path: Path, reader: ChatReader) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each request of a log that vLLM printed; one whose messages are not found has the key `prompt_text` alone."""
    text = _text_of(path)
    if not text.strip():
        raise InputError(f"{WHAT} {path} is empty")
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    found = False
    for number, line in enumerate(text.split("\n"), 1):
        if (request := REQUEST.search(line)) is None:
            continue
        prompt = ast.literal_eval(request["text"])
        if prompt is None and request["ids"]:
            prompt = reader.tokenizer.decode([int(each) for each in request["ids"].split(",")], skip_special_tokens=False)
        if prompt is None:
            continue
        found = True
        messages, time = reader.messages(str(prompt)), _in_year(request["date"], written)
        values = {"prompt_text": prompt} if messages is None else {"messages": messages}
        yield f"{WHAT} {path}, line {number}", {**values, "time": None if time is None else time.isoformat()}
    if not found:
        raise InputError(
            f"{WHAT} {path} holds no request with its prompt, as vLLM prints it with --enable-log-requests and "
            f"VLLM_LOGGING_LEVEL=DEBUG; a log of another form is a file with one of {', '.join(SUFFIXES)} and the keys of one "
            f"of the formats {', '.join(KEYS)}"
        )


def _text_of(path: Path) -> str:
    try:
        content = path.read_bytes()
        # A server prints what it is sent, and rotation cuts anywhere: bytes that are no UTF-8 must not cost the whole file.
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8", "replace")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {WHAT} {path}: {first_line(error)}") from error


def _in_year(date: str, written: datetime) -> datetime | None:
    """Return the time of a line that names no year: the last one before its file was written."""
    for year in (written.year, written.year - 1):
        try:
            time = datetime.strptime(f"{year}-{date}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
        except ValueError:
            continue
        if (time - written).days < 1:
            return time
    return None


def _time(value: Any) -> datetime | None:
    try:
        seconds = float(value) if not isinstance(value, bool) else None
    except (TypeError, ValueError):
        seconds = None
    try:
        if seconds is not None:
            return datetime.fromtimestamp(seconds / 1000 if seconds >= MILLISECONDS_FROM else seconds, UTC)
        time = datetime.fromisoformat(str(value))
    except (ValueError, OverflowError, OSError):
        return None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)

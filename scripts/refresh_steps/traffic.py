"""Prompts of served conversations, without secrets and duplicates; what was removed is counted.

A conversation with a private key is dropped. What else has the form of a secret, and e-mail addresses, are masked in every
text; ids that a log gives its rows are not kept, because they may name people. Answers are not kept either: the target writes
them anew.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import new_folder, write_json, write_text
from configs.runtime.redaction import PRIVATE_KEY, mask_counting, redact
from configs.schema.commands.refreshing import LogConfig, RefreshConfig
from configs.schema.target import TargetConfig
from distill.generation.prompts import Prompt, everything_said
from distill.generation.row_formats import ID_KEYS, detect_format, read_row
from distill.generation.sources import read_source
from distill.generation.split import NearDuplicates
from heads.frozen.checkpoint_files import UNREADABLE
from heads.frozen.identity import locate
from heads.frozen.tokenizer import load_tokenizer, no_chat_template

log = logging.getLogger("draftsmith")
PROMPTS, MANIFEST = "prompts.jsonl", "manifest.json"
TIME_KEYS = ("time", "timestamp", "created", "created_at", "ts")
AROUND = ("request", "body", "response")  # sections of a row that may hold its time
MILLISECONDS_FROM = 1e11  # in seconds a time in the sixth millennium


@dataclass(frozen=True, kw_only=True)
class ServedPrompt:
    """What a conversation asked, secrets masked, and when it was served, where the log says."""

    prompt: Prompt
    time: datetime | None

    def to_line(self) -> str:
        """Return it as a line of JSON that prompts and suites are read from."""
        prompt = self.prompt
        asked: dict[str, Any] = {"turns": prompt.turns} if len(prompt.turns) > 1 else {"messages": prompt.messages}
        if prompt.tools:
            asked["tools"] = prompt.tools
        return json.dumps({**asked, "category": prompt.category}) + "\n"


@dataclass
class Traffic:
    """What was read of a log, in the order of time where every row has one, and what was removed."""

    rows: list[ServedPrompt] = field(default_factory=list)
    num_rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    without_time: list[str] = field(default_factory=list)  # where such rows stand


def write_traffic(config: RefreshConfig, folder: Path) -> None:
    """Write the newest conversations of the log as prompts, and what was counted."""
    traffic = read_traffic(config)
    rows = newest(traffic, traffic.rows, config.log, config.log.num_conversations)
    times = [row.time for row in rows if row.time is not None]
    span = {"from": min(times).isoformat(), "to": max(times).isoformat()} if times else {}
    with new_folder(folder) as scratch:
        write_text(scratch / PROMPTS, "".join(row.to_line() for row in rows))
        manifest = {
            "format_version": 1,
            "log": config.log.path,
            "rows": traffic.num_rows,
            "kept": len(rows),
            "dropped": dict(sorted((+traffic.dropped).items())),
            "masked": dict(sorted((+traffic.masked).items())),  # + leaves out what is 0
            "without_time": len(traffic.without_time),
        }
        write_json(scratch / MANIFEST, manifest | span)
    removed = ", ".join(f"{count} {name}" for name, count in [*traffic.dropped.items(), *traffic.masked.items()] if count)
    log.info("log %s: %d conversations of %d (%s)", config.log.path, len(rows), traffic.num_rows, removed or "nothing removed")


def read_traffic(config: RefreshConfig) -> Traffic:
    """Read the log and remove secrets; an InputError where no conversation of it can be read."""
    traffic, complaint = Traffic(), ""
    tokenizer = _chat_tokenizer(config.target)
    for where, row in read_source(Path(config.log.path), "log", still_written=True):
        traffic.num_rows += 1
        try:
            prompt = _prompt(row, config.log, where)
            _check_can_be_asked(prompt, tokenizer, where)
        except InputError as error:
            traffic.dropped["unreadable"] += 1
            complaint = complaint or mask_counting(str(error), Counter())
            continue
        if PRIVATE_KEY.search(json.dumps([prompt.turns, prompt.history, prompt.tools], ensure_ascii=False)):
            traffic.dropped["private_key"] += 1
            continue
        time = _served_at(row, config.log.time_field)
        if time is None:
            traffic.without_time.append(where)
        traffic.rows.append(ServedPrompt(prompt=_masked(prompt, traffic), time=time))
    if not traffic.rows:
        why = f"the first that is not: {complaint}" if complaint else "each holds a private key"
        raise InputError(f"log.path: {config.log.path} has {traffic.num_rows} rows, of which none can be taken; {why}")
    if complaint:
        log.warning("log %s: %d rows were left out; the first: %s", config.log.path, traffic.dropped["unreadable"], complaint)
    if not traffic.without_time:
        traffic.rows.sort(key=lambda row: row.time or datetime.min)
    return traffic


def newest(traffic: Traffic, rows: Sequence[ServedPrompt], settings: LogConfig, max_rows: int) -> list[ServedPrompt]:
    """Return the last of some rows that are no duplicates of later ones, in their order; the others are counted."""
    kept: list[ServedPrompt] = []
    seen, near = set[str](), NearDuplicates()
    for number, row in enumerate(reversed(rows)):
        if len(kept) == max_rows:
            traffic.dropped["older"] += len(rows) - number
            break
        said = everything_said(row.prompt)
        if said in seen:
            traffic.dropped["duplicate"] += 1
        elif settings.near_duplicates == "drop" and not near.add(row.prompt.user_text):
            traffic.dropped["near_duplicate"] += 1
        else:
            kept.append(row)
        seen.add(said)
    return kept[::-1]


def _served_at(row: Mapping[str, Any], field: str | None) -> datetime | None:
    """Return when a row was served, None where it does not say."""
    sections = [row, *(row[key] for key in AROUND if isinstance(row.get(key), Mapping))]
    keys = TIME_KEYS if field is None else (field,)
    values = (section[key] for section in sections for key in keys if section.get(key) is not None)
    return next((time for value in values if (time := _time(value)) is not None), None)


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


def _chat_tokenizer(target: TargetConfig) -> PreTrainedTokenizerBase:
    """Return the target's tokenizer; an InputError where it cannot be read or has no chat template."""
    try:
        tokenizer = load_tokenizer(locate(target), target)
    except UNREADABLE as error:
        raise InputError(f"target.name: {target.name} has no tokenizer that can be read: {first_line(error)}") from error
    if tokenizer.chat_template is None:
        raise InputError(no_chat_template(redact(target.name)))
    return tokenizer


def _prompt(row: dict[str, Any], settings: LogConfig, where: str) -> Prompt:
    format = detect_format(row, where, "log.field", settings.field)
    unnamed = row | dict.fromkeys(ID_KEYS & row.keys())  # whatever a log calls a request
    return read_row(unnamed, format, where, column=settings.field, setting="log.field")


def _check_can_be_asked(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Refuse a conversation that is not texts alone, or that the chat template refuses: the target would stop at it later."""
    if prompt.media:
        raise InputError(f"{where}: the conversation has images or sounds, and a refresh takes texts only")
    try:
        tools: Any = list(prompt.tools) or None
        text = tokenizer.apply_chat_template(prompt.messages, tools=tools, add_generation_prompt=True, tokenize=False)
        str(text).encode()  # half of a character that was cut in two has no tokens
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise InputError(f"{where}: the target's chat template does not take the conversation: {first_line(error)}") from error


def _masked(prompt: Prompt, traffic: Traffic) -> Prompt:
    found = Counter[str]()

    def mask(text: str) -> str:
        return mask_counting(text, found)

    masked = replace(
        prompt,
        turns=tuple(map(mask, prompt.turns)),
        history=tuple(_walk(message, mask) for message in prompt.history),
        tools=tuple(_walk(tool, mask) for tool in prompt.tools),
        category=mask(prompt.category),
        prompt_id="",
        turn_keys=_walk(prompt.turn_keys, mask),
        answer=None,
        answer_keys={},
    )
    traffic.masked.update(found)
    return masked


def _walk(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {key: _walk(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_walk(each, change) for each in value]
    return change(value) if isinstance(value, str) else value

"""A log of served conversations as prompts, the newest first, without secrets and duplicates; what was removed is counted.

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

from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedTokenizerBase

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import new_folder, write_json, write_text
from configs.runtime.redaction import PRIVATE_KEY, mask_counting, redact
from configs.schema.commands.running import RunConfig
from configs.schema.data import PromptsConfig
from configs.schema.target import TargetConfig
from distill.generation.prompts import NearDuplicates, Prompt, everything_said
from distill.generation.row_forms import ID_KEYS, detect_format, read_row
from distill.generation.sources import read_source
from heads.frozen.identity import locate
from heads.frozen.tokenizer import in_template, load_tokenizer, no_chat_template
from heads.frozen.weights import UNREADABLE

log = logging.getLogger("draftsmith")
TIME_KEYS = ("time", "timestamp", "created", "created_at", "ts")
AROUND = ("request", "body", "response")  # sections of a row that may hold its time
TIME = TypeAdapter(datetime)


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
class ServedLog:
    """What was read of a log, the newest first where every row has its time, and what was removed."""

    rows: list[ServedPrompt] = field(default_factory=list)
    num_rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    num_without_time: int = 0


def write_log_prompts(run: RunConfig, path: Path) -> None:
    """Write the log's conversations as a file of prompts, with a manifest of what was counted beside it."""
    served, asked = read_log(run), run.prompts
    rows = newest(served, served.rows, asked.num_prompts)
    times = [row.time for row in rows if row.time is not None]
    manifest = {
        "log": asked.path,
        "rows": served.num_rows,
        "kept": len(rows),
        "dropped": dict(sorted((+served.dropped).items())),  # + leaves out what is 0
        "masked": dict(sorted((+served.masked).items())),
        "without_time": served.num_without_time,
        "from": min(times).isoformat() if times else None,
        "to": max(times).isoformat() if times else None,
    }
    with new_folder(path.parent) as scratch:
        write_text(scratch / path.name, "".join(row.to_line() for row in rows))
        write_json(scratch / "manifest.json", manifest)
    removed = ", ".join(f"{count} {name}" for name, count in [*served.dropped.items(), *served.masked.items()] if count)
    log.info("log %s: %d conversations of %d (%s)", asked.path, len(rows), served.num_rows, removed or "nothing removed")


def read_log(run: RunConfig) -> ServedLog:
    """Read the log and remove secrets; an InputError where no conversation of it can be read."""
    served, complaint, path = ServedLog(), "", str(run.prompts.path)
    tokenizer = _chat_tokenizer(run.stage_target)
    for where, row in read_source(Path(path), "log", still_written=True):
        served.num_rows += 1
        try:
            prompt = _prompt(row, run.prompts, where)
            _check_can_be_asked(prompt, tokenizer, where)
        except InputError as error:
            served.dropped["unreadable"] += 1
            complaint = complaint or mask_counting(str(error), Counter())
            continue
        if PRIVATE_KEY.search(json.dumps([prompt.turns, prompt.history, prompt.tools], ensure_ascii=False)):
            served.dropped["private_key"] += 1
            continue
        time = _served_at(row, run.refresh.time_field if run.refresh else None)
        served.num_without_time += time is None
        served.rows.append(ServedPrompt(prompt=_masked(prompt, served.masked), time=time))
    if not served.rows:
        why = f"the first that is not: {complaint}" if complaint else "each holds a private key"
        raise InputError(f"--prompts: {path} has {served.num_rows} rows, of which none can be taken; {why}")
    if complaint:
        log.warning("log %s: %d rows were left out; the first: %s", path, served.dropped["unreadable"], complaint)
    served.rows.reverse()  # of a log without times the last rows are the newest
    if not served.num_without_time:
        served.rows.sort(key=lambda row: row.time or datetime.min, reverse=True)
    return served


def newest(served: ServedLog, rows: Sequence[ServedPrompt], most: int) -> list[ServedPrompt]:
    """Return the first of some rows, the newest ones, that are no duplicates of newer ones; the others are counted.

    A near duplicate shares half of its runs of four words with a newer one, as the turns of one chat do.
    """
    kept: list[ServedPrompt] = []
    seen, near = set[str](), NearDuplicates()
    for number, row in enumerate(rows):
        if len(kept) == most:
            served.dropped["older"] += len(rows) - number
            break
        said = everything_said(row.prompt)
        if said in seen:
            served.dropped["duplicate"] += 1
        elif not near.add(row.prompt.user_text):
            served.dropped["near_duplicate"] += 1
        else:
            kept.append(row)
        seen.add(said)
    return kept


def _served_at(row: Mapping[str, Any], field: str | None) -> datetime | None:
    """Return when a row was served, None where it does not say."""
    sections = [row, *(row[key] for key in AROUND if isinstance(row.get(key), Mapping))]
    keys = TIME_KEYS if field is None else (field,)
    values = (section[key] for section in sections for key in keys if section.get(key) is not None)
    return next((time for value in values if (time := _time(value)) is not None), None)


def _time(value: Any) -> datetime | None:
    """Return a time in seconds or milliseconds since 1970, or in ISO 8601; None for anything else."""
    try:
        time = TIME.validate_python(value)
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValidationError, OverflowError):
        return None


def _chat_tokenizer(target: TargetConfig) -> PreTrainedTokenizerBase:
    """Return the target's tokenizer; an InputError where it cannot be read or has no chat template."""
    try:
        tokenizer = load_tokenizer(locate(target), target)
    except UNREADABLE as error:
        raise InputError(f"target.name: {target.name} has no tokenizer that can be read: {first_line(error)}") from error
    if tokenizer.chat_template is None:
        raise InputError(no_chat_template(redact(target.name)))
    return tokenizer


def _prompt(row: dict[str, Any], settings: PromptsConfig, where: str) -> Prompt:
    format = detect_format(row, where, "prompts.field", settings.field)
    unnamed = row | dict.fromkeys(ID_KEYS & row.keys())  # whatever a log calls a request
    return read_row(unnamed, format, where, column=settings.field, setting="prompts.field")


def _check_can_be_asked(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Refuse a conversation that is not texts alone, or that the chat template refuses: the target would stop at it later."""
    if prompt.media or prompt.of_ids:
        raise InputError(f"{where}: the conversation has images, sounds or token ids, and a log is taken for its texts only")
    try:
        in_template(tokenizer, tokenizer.name_or_path, prompt.messages, tools=prompt.tools).encode()
    except ValueError as error:  # also of half of a character that was cut in two, which has no tokens
        raise InputError(f"{where}: {first_line(error)}") from error


def _masked(prompt: Prompt, found: Counter[str]) -> Prompt:
    def mask(text: str) -> str:
        return mask_counting(text, found)

    return replace(
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


def _walk(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with all its texts changed."""
    if isinstance(value, dict):
        return {key: _walk(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_walk(each, change) for each in value]
    return change(value) if isinstance(value, str) else value

"""The prompts of a file, a folder or a data set, and the rows that they are read of.

Rows of JSON and CSV are read here and not by `datasets`, which
gives all rows the keys and types of some, and so would change messages, tools and numbers. A last message by the assistant is
the data set's own answer, used only with `answers.written_by=dataset`.

The forms of rows, recognised by their keys:

    turns      turns: user messages to be answered one after the other (MT-bench, Spec-Bench)
    messages   messages: {role, content} [tools], as of OpenAI; content may be a list of parts. Also inside `request`, of a log
               whose responses are not read, or inside `body`, as of OpenAI's batch files
    sharegpt   conversations: {from, value}, or {role, content} as of SpecForge and speculators [tools]
    ids        prompt_ids [sample, answer_ids], token ids; several rows of one prompt are told apart by `sample`
    column     a column that the config names: a text, a list of turns, or messages [a second one with the answer]

Parts are texts and, in what the user says, images and sounds: {type: image_url, image_url: {url}} and {type: input_audio,
input_audio: {data, format}} as of OpenAI, {type: audio_url, audio_url: {url}}, or {type: image} and {type: audio} with url,
path, or a key of the type's name. The text then has an `OBJECT` in each one's place, and the prompt their references as `media`
(`heads.frozen.media.MediaPrompt`).

A conversation that ends with the assistant brings the answer to the message before it, which is the user's or a tool's result.
The answer may have `reasoning_content` (or `reasoning`) and `tool_calls`. A row may also have `category` and an id; other keys
are ignored.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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
from heads.frozen.loading import Target
from heads.frozen.tokenizer import OBJECT, SOUND

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
MAX_CSV_FIELD = 2**31 - 1  # characters; Python's csv module allows 131,072
SourceRow = tuple[str, dict[str, Any]]  # where it stands, for error messages; its keys and values

COLUMN, COLUMN_NAME = "column", "prompt"  # the form, and the column where none is named
# The key by which a row is recognised -> its form, tried in this order.
FORMS = {
    "turns": "turns",
    "messages": "messages",
    "request": "messages",
    "body": "messages",
    "conversations": "sharegpt",
    "prompt_ids": "ids",
}
IMAGE_PARTS, SOUND_PARTS = ("image", "image_url"), ("audio", "audio_url", "input_audio")
# The keys by which parts name an image or a sound, tried in this order.
IMAGE_KEYS, SOUND_KEYS = ("image_url", "url", "path", "image"), ("input_audio", "audio_url", "url", "path", "audio")
CHATS = ("messages", "sharegpt")
# What a chat template may read
MESSAGE_KEYS = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")
ID_KEYS = ("question_id", "id", "prompt_id", "task_id", "custom_id")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}

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
        raise InputError(f"prompts.field: no row of {config.path} has {config.field!r}; the last has {', '.join(row)}")
    counts = ", ".join(f"{count:,} as {name}" for name, count in formats.most_common())
    logger.info("prompt file %s: read %s", config.path, counts)
    return prompts


def dataset_prompts(config: PromptsConfig) -> Iterator[Prompt]:
    rows = load_rows(str(config.path), config.subset, config.split, revision=config.revision, section="prompts")
    if config.names_a_column and config.field not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise InputError(f"prompts.field: data set {config.path} has no column {config.field!r}; there are {columns}")
    if not len(rows):
        raise InputError(f"data set {config.path}, split {config.split!r}, is empty")
    for number, row in enumerate(rows):
        yield _read_row({**row, "question_id": f"row-{number}"}, config, f"data set {config.path}, row {number}")[0]


def _read_row(row: Mapping[str, Any], config: PromptsConfig, where: str) -> tuple[Prompt, str]:
    setting, format = "prompts.field", ""
    if config.template is not None:
        try:
            row, format = {**row, config.field: config.template.format_map(row)}, COLUMN
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            problem = f"does not fit ({type(error).__name__} {error}); the row has {', '.join(row)}"
            raise InputError(f"{where}: prompts.template {config.template!r} {problem}") from error
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
        media = f"prompt {with_media.prompt_id} brings images or sounds, which only the local target reads"
        raise InputError(f"answers.written_by: {media}; set it to target")
    num_with_tools = sum(bool(prompt.tools) for prompt in prompts)
    if num_with_tools and "tools" not in str(target.tokenizer.chat_template):
        logger.warning("%d prompts bring tools, which the chat template of the target does not read", num_with_tools)


def check_given(prompts: Sequence[Prompt]) -> None:
    without = [prompt.prompt_id for prompt in prompts if prompt.answer is None]
    if without:
        missing = f"{len(without)} of {len(prompts)} prompts bring no answer, the first is {without[0]}"
        raise InputError(f"answers.written_by 'dataset': {missing}; leave those rows out, or set it to target")


# --- rows


def detect_format(row: Mapping[str, Any], where: str, setting: str, column: str = COLUMN_NAME) -> str:
    """Return the form of a row, by its keys; `setting` is the config key by which a user names a `column`, for the error."""
    if (key := next((key for key in FORMS if row.get(key) is not None), None)) is not None:
        return FORMS[key]
    if column in row:
        return COLUMN
    keys = ", ".join(row) or "(none)"
    raise InputError(f"{where}: none of the keys {keys} is that of a form ({', '.join(FORMS)}); name the prompt's by {setting}")


def read_row(
    row: Mapping[str, Any],
    format: str,
    where: str,
    *,
    column: str | None = None,
    answer_column: str | None = None,
    default_category: str = UNCATEGORISED,
    default_id: str | None = None,
    setting: str,
) -> Prompt:
    """Return the prompt of a row in one of the forms, or in `column` (None: `prompt`), its answer in `answer_column`.

    A row without an id gets `default_id`, or is named by its content where that is None and with `turns` and `messages`. Errors
    name the row by `where`, and the config key of the column by `setting`.
    """
    by_content = format in ("turns", "messages")
    given_id = next((row[key] for key in (ID_KEYS[:2] if by_content else ID_KEYS) if key in row), None)
    given_id = (None if by_content else default_id) if given_id in (None, "") else given_id  # "": as CSV says none
    category = default_category if row.get("category") in (None, "") else row["category"]
    if isinstance(given_id, bool) or not isinstance(given_id, str | int | None):
        raise InputError(f"{where}: question_id must be a text or a whole number, got {given_id!r}")
    if not isinstance(category, str):
        raise InputError(f"{where}: category must be a text, got {category!r}")
    chat = row
    if format == "messages" and row.get("messages") is None:  # in the request of a log, or of a batch
        chat = row.get("request") or row.get("body") or row
    asked, answer = _asked(chat, format, (column or COLUMN_NAME, answer_column), where, setting)
    tools = _parse_tools(chat["tools"], where) if format in CHATS and chat.get("tools") else []
    prompt = _as_prompt(asked, answer, where, is_chat=format in CHATS)
    if given_id is None:  # a hash of the content in its place
        content: list[Any] = [list(prompt.history), list(prompt.turns), *tools, *prompt.media]
        content += [prompt.turn_keys] if prompt.turn_keys else []
        text = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
        given_id = hashlib.sha256(text).hexdigest()[:16]
    return replace(prompt, prompt_id=str(given_id), category=category, tools=tuple(tools), where=where)


def _asked(row: Any, format: str, columns: tuple[str, str | None], where: str, setting: str) -> tuple[Any, Any]:
    """Return what a row asks, a text, turns or messages, and the answer that it brings beside them, if any."""
    keys = {"sharegpt": ("conversations",), "ids": ("prompt_ids",), COLUMN: columns}.get(format, (format,))
    if not isinstance(row, Mapping) or (missing := [key for key in keys if key is not None and key not in row]):
        there = ", ".join(row) if isinstance(row, Mapping) else str(row)[:60]
        raise InputError(f"{where}: no key {(missing if isinstance(row, Mapping) else keys)[0]!r} ({setting}) in: {there}")
    asked = row[str(keys[0])]
    if format == "sharegpt":
        if not isinstance(asked, list) or not all(isinstance(each, dict) for each in asked):
            raise InputError(f"{where}: conversations must be a list of objects, got {str(asked)[:60]!r}")
        said = [each if "role" in each else {"role": each.get("from"), "content": each.get("value")} for each in asked]
        return [each | {"role": SHAREGPT_ROLES.get(str(each["role"]), each["role"])} for each in said], None
    if format == "ids":
        sample = f" #{row['sample']}" if row.get("sample") is not None else ""
        answer = None if row.get("answer_ids") is None else _spelled(row["answer_ids"], "answer_ids", where)
        return _spelled(asked, "prompt_ids", where) + sample, answer
    return asked, None if len(keys) == 1 or keys[1] is None else row[keys[1]]


def _as_prompt(asked: Any, answer: Any, where: str, *, is_chat: bool) -> Prompt:
    if isinstance(asked, str) and not is_chat:
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not asked:
        raise InputError(f"{where}: {'messages' if is_chat else 'turns'} must be a list, not empty, got {str(asked)[:60]!r}")
    if not is_chat and not isinstance(asked[0], dict):
        if blank := [turn for turn in asked if not isinstance(turn, str) or not turn.strip()]:
            raise InputError(f"{where}: a turn must be a text that is not blank, got {str(blank[0])[:60]!r}")
        return Prompt(prompt_id="", category="", turns=tuple(asked))
    if answer not in (None, ""):
        asked = [*asked, *(answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}])]
    messages, media = [], []
    for each in asked:
        message, found = _plain_message(each, where) if isinstance(each, dict) else ({}, [])
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise InputError(f"{where}: a message must have a role and a content, both texts, got {str(each)[:60]!r}")
        messages.append(message)
        media += found
    answered = messages.pop() if messages[-1]["role"] == "assistant" else {}
    last = messages.pop() if messages else {}
    if last.get("role") not in ("user", "tool") or (last["role"] == "user" and not last["content"].strip()):
        raise InputError(f"{where}: messages must end with a user's that is not blank, or a tool's (and one answer)")
    return Prompt(
        prompt_id="",
        category="",
        turns=(last["content"],),
        history=tuple(messages),
        turn_keys={} if last["role"] == "user" else {key: value for key, value in last.items() if key != "content"},
        answer=answered.get("content"),
        answer_keys={key: value for key, value in answered.items() if key not in ("role", "content")},
        media=tuple(media),
    )


def _plain_message(given: dict[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Return a message with its text parts joined and its calls of tools parsed, and references to its images and sounds."""
    if given.get("reasoning"):  # as newer servers call it
        given = {"reasoning_content": given["reasoning"]} | given
    if given.get("tool_calls"):
        content = given.get("content")
        given = given | {"tool_calls": _parse_arguments(given["tool_calls"]), "content": "" if content is None else content}
    message = {key: given[key] for key in MESSAGE_KEYS if key in given}
    content = message.get("content")
    if not isinstance(content, list):
        return message, []
    texts, media = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise InputError(f"{where}: a part of type text must hold a text, got {str(part)[:60]!r}")
            texts.append(part["text"])
        elif kind in IMAGE_PARTS + SOUND_PARTS and message.get("role") == "user":
            texts.append(OBJECT)
            media.append(_reference(part, where, is_image=kind in IMAGE_PARTS))
        else:
            role = message.get("role")
            raise InputError(f"{where}: a message of {role} has a part of type {kind}; only users send images and sounds")
    if media and any(OBJECT in text for text in texts if text != OBJECT):
        raise InputError(f"{where}: a text next to images or sounds holds U+FFFC, which marks the place of one")
    return message | {"content": "".join(texts)}, media


def _parse_tools(value: Any, where: str) -> list[Any]:
    """Return the tools of a row: a list of objects, or a text with one in JSON, as some data sets keep it."""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"{where}: tools must be a list of objects such as {{type, function}}, got {str(value)[:60]!r}")
    return tools


def _spelled(ids: Any, key: str, where: str) -> str:
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise InputError(f"{where}: {key} must be a list of token ids, at least one, got {str(ids)[:60]!r}")
    return " ".join(map(str, ids))


def _parse_arguments(calls: Any) -> Any:
    """Return the calls of a message with their arguments as objects, which chat templates and engines work on: logs have them
    as JSON in a text, which a template would quote once more. What is no such call stays as it is.
    """
    if isinstance(calls, list):
        return [_parse_arguments(call) for call in calls]
    if not isinstance(calls, dict):
        return calls
    if isinstance(calls.get("function"), dict):
        return {**calls, "function": _parse_arguments(calls["function"])}
    try:
        arguments = json.loads(calls["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return calls
    return {**calls, "arguments": arguments} if isinstance(arguments, dict) else calls


def _reference(part: Mapping[str, Any], where: str, *, is_image: bool) -> str:
    given = next((part[key] for key in (IMAGE_KEYS if is_image else SOUND_KEYS) if part.get(key)), None)
    reference = given.get("url") if isinstance(given, Mapping) else given
    if not is_image and isinstance(given, Mapping) and "data" in given:
        if given.get("format") != "wav":
            raise InputError(f"{where}: a sound has format {str(given.get('format'))[:60]!r}; wav is read")
        reference = f"data:audio/wav;base64,{given['data']}"
    if not isinstance(reference, str) or not reference:
        kind = "an image" if is_image else "a sound"
        raise InputError(f"{where}: {kind} must be named by a path, a data URL or a URL, got {str(given)[:60]!r}")
    return reference if is_image else SOUND + reference

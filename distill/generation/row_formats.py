"""The forms in which rows hold prompts and conversations, recognised by their keys and read as a `Prompt`.

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

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from configs.runtime.errors import InputError
from distill.generation.prompts import UNCATEGORISED, Prompt
from heads.frozen.tokenizer import OBJECT, SOUND

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


def detect_format(row: Mapping[str, Any], where: str, setting: str, column: str = COLUMN_NAME) -> str:
    """Return the form of a row, by its keys; `setting` is the config key by which a user names a `column`, for the error."""
    if (key := next((key for key in FORMS if row.get(key) is not None), None)) is not None:
        return FORMS[key]
    if column in row:
        return COLUMN
    raise InputError(
        f"{where}: none of the keys {', '.join(row) or '(none)'} is that of a known form ({', '.join(FORMS)}) or {column!r}; "
        f"name the one that holds the prompts with {setting}"
    )


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
    """Return a prompt, without id and category, of what a row asks."""
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
        raise InputError(
            f"{where}: messages must end with a user message that is not blank, or with a tool's result (one assistant message "
            "may follow)"
        )
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
            raise InputError(
                f"{where}: a message of {message.get('role')} has a part of type {kind}; texts are accepted, and images and "
                "sounds of the user"
            )
    if media and any(OBJECT in text for text in texts if text != OBJECT):
        raise InputError(f"{where}: a text next to images or sounds holds U+FFFC, which marks the place of one: leave it out")
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
    """Return token ids as the text that `heads.frozen.tokenizer` reads."""
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
        named = "an image must be named" if is_image else "a sound must be given as input_audio {data, format}, or named"
        raise InputError(f"{where}: {named} by a path, a data URL or a URL, got {str(given)[:60]!r}")
    return reference if is_image else SOUND + reference

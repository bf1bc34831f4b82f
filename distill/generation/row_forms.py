"""What a row of a file or a data set asks. A row's form is recognised by its keys:

    turns      turns: user messages to be answered one after the other (MT-bench, Spec-Bench)
    messages   messages: {role, content} [tools], as of OpenAI; content may be a list of parts. Also inside `request`, of a log
               whose responses are not read, or inside `body`, as of OpenAI's batch files
    sharegpt   conversations: {from, value}, or {role, content} as of SpecForge and speculators [tools]; a `function_call` is a
               call of a tool, an `observation` its result
    ids        prompt_ids [sample, answer_ids], what the target reads; several rows of one prompt are told apart by `sample`. Or
               the input_ids of a whole chat and a loss_mask, 1 for each id that the target wrote, else 0, as of speculators and
               SpecForge; in rows of Model-Optimizer the ids are `token_ids`. A user's message is then whatever was read before
               an answer; what follows the last answer is left out
    column     a column that the config names: a text, a list of turns, or messages [a second one with the answer]

Parts are texts and, in what the user says, images and sounds: {type: image_url, image_url: {url}} and {type: input_audio,
input_audio: {data, format}} as of OpenAI, {type: audio_url, audio_url: {url}}, or {type: image} and {type: audio} with url,
path, or a key of the type's name. The text then has an `OBJECT` in each one's place, and the prompt their references as `media`
(`heads.frozen.media.MediaPrompt`).

A conversation that ends with the assistant brings the answer to the message before it, which is the user's or a tool's result:
the data set's own answer, used only with `answers.written_by=dataset`. It may have `reasoning_content` (or `reasoning`, or
`thinking`) and `tool_calls`. A row may also have `category` and an id; other keys are ignored. A row that cannot be a prompt is
a `BadRow`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

from distill.dataset.batches import spans_of
from distill.dataset.conversations import ASKING, Message
from distill.generation.bad_rows import BadRow
from distill.generation.prompts import UNCATEGORISED, Prompt, spelled
from heads.frozen.tokenizer import OBJECT, SOUND

COLUMN, COLUMN_NAME = "column", "prompt"  # the form, and the column where none is named
# The key by which a row is recognised -> its form, tried in this order.
FORMS = {
    "loss_mask": "ids",
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
# What a chat template may read
MESSAGE_KEYS = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")
ID_KEYS = ("question_id", "id", "prompt_id", "task_id", "custom_id")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "model": "assistant",
}


def detect_format(row: Mapping[str, Any], where: str, setting: str, column: str = COLUMN_NAME) -> str:
    """Return the form of a row, by its keys; `setting` is the config key by which a user names a `column`, for the error."""
    if (key := next((key for key in FORMS if row.get(key) is not None), None)) is not None:
        return FORMS[key]
    if column in row:
        return COLUMN
    keys = ", ".join(row) or "(none)"
    found = f"none of the keys {keys} is that of a form ({', '.join(FORMS)}); name the prompt's by {setting}"
    raise BadRow("no_known_key", found, where)


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
    try:
        key = next((key for key in ID_KEYS[: 2 if by_content else None] if row.get(key) not in (None, "")), None)
        given_id = row[key] if key is not None else None if by_content else default_id
        category = row.get("category") or default_category
        if isinstance(given_id, bool) or not isinstance(given_id, str | int | None):
            raise BadRow("id", f"{key} must be a text or a whole number, got {given_id!r}")
        if not isinstance(category, str):
            raise BadRow("category", f"category must be a text, got {category!r}")
        prompt = _prompt(row, format, (column or COLUMN_NAME, answer_column), setting)
    except BadRow as error:
        raise error.at(where) from error
    prompt_id = hash_of(prompt) if given_id is None else str(given_id)
    return replace(prompt, prompt_id=prompt_id, category=category, where=where)


def _prompt(row: Mapping[str, Any], format: str, columns: tuple[str, str | None], setting: str) -> Prompt:
    if format == "messages":
        chat = row if row.get("messages") is not None else row.get("request") or row.get("body") or row
        messages = _value(chat, "messages", setting)
        if chat.get("continue_final_message"):
            raise BadRow("open_answer", "the request continues its last message (continue_final_message); leave the row out")
        return replace(_chat(messages, chat.get("tools")), of_ids=bool(row.get("of_ids")))
    if format == "sharegpt":
        said = row["conversations"]
        if not isinstance(said, list) or not all(isinstance(each, dict) for each in said):
            raise BadRow("messages", f"conversations must be a list of objects, got {str(said)[:60]!r}")
        return _chat([_from_sharegpt(each) for each in said], row.get("tools"))
    if format == "ids":
        return replace(_chat(chat_in_ids(row)), of_ids=True)
    key, answer_key = columns if format == COLUMN else (format, None)
    asked, answer = _value(row, key, setting), None if answer_key is None else _value(row, answer_key, setting)
    is_chat = isinstance(asked, list) and bool(asked) and isinstance(asked[0], dict)
    if answer in (None, ""):
        return _chat(asked) if is_chat else _turns([asked] if isinstance(asked, str) else asked)
    said = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return _chat([*said, *(answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}])])


def _value(row: Any, key: str, setting: str) -> Any:
    if not isinstance(row, Mapping) or key not in row:
        there = ", ".join(row) if isinstance(row, Mapping) else str(row)[:60]
        raise BadRow("no_known_key", f"no key {key!r} ({setting}) in: {there}")
    return row[key]


def hash_of(prompt: Prompt) -> str:
    """Return a name for a prompt, by its content."""
    content: list[Any] = [list(prompt.history), list(prompt.turns), *prompt.tools, *prompt.media]
    content += [prompt.turn_keys] if prompt.turn_keys else []
    text = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest()[:16]


def _turns(turns: Any, answer: str | None = None) -> Prompt:
    if not isinstance(turns, list) or not turns:
        raise BadRow("empty", f"turns must be a list, not empty, got {str(turns)[:60]!r}")
    if blank := [turn for turn in turns if not isinstance(turn, str) or not turn.strip()]:
        raise BadRow("blank_turn", f"a turn must be a text that is not blank, got {str(blank[0])[:60]!r}")
    return Prompt(prompt_id="", category="", turns=tuple(turns), answer=answer)


def _chat(said: Any, tools: Any = None) -> Prompt:
    if not isinstance(said, list) or not said:
        raise BadRow("empty", f"messages must be a list, not empty, got {str(said)[:60]!r}")
    messages, media = [], []
    for each in said:
        message, found = _plain_message(each)
        messages.append(message)
        media += found
    answered = messages.pop() if messages[-1]["role"] == "assistant" else {}
    last = messages.pop() if messages else {}
    if last.get("role") not in ASKING:
        raise BadRow("no_question", "messages must end with a user's or a tool's, and after it one answer at most")
    if last["role"] == "user" and not last["content"].strip():
        raise BadRow("blank_turn", "the user's last message must not be blank")
    return Prompt(
        prompt_id="",
        category="",
        turns=(last["content"],),
        history=tuple(messages),
        tools=tuple(_parse_tools(tools)) if tools else (),
        turn_keys={} if last["role"] == "user" else {key: value for key, value in last.items() if key != "content"},
        answer=answered.get("content"),
        answer_keys={key: value for key, value in answered.items() if key not in ("role", "content")},
        media=tuple(media),
    )


def _from_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    if "role" not in message:
        message = {"role": message.get("from"), "content": message.get("value")}
    if message["role"] != "function_call":
        return message
    try:
        calls = json.loads(str(message["content"]))
    except ValueError as error:
        raise BadRow("tool_calls", f"a function_call must be JSON, got {str(message['content'])[:60]!r}") from error
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _plain_message(given: Any) -> tuple[dict[str, Any], list[str]]:
    """Return a message with its text parts joined and its calls of tools parsed, and references to its images and sounds."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise BadRow("messages", f"a message must be an object with a role, a text, got {str(given)[:60]!r}")
    given = {**given, "role": SHAREGPT_ROLES.get(given["role"], given["role"])}
    if given["role"] not in ROLES:
        raise BadRow("unknown_role", f"a message has the role {given['role'][:60]!r}, and roles are {', '.join(ROLES)}")
    if given.get("prefix"):
        raise BadRow("open_answer", "the last message is the beginning of an answer (prefix); leave the row out")
    if reasoning := next((given[key] for key in REASONING_KEYS if given.get(key)), None):
        given["reasoning_content"] = reasoning
    if calls := given.pop("tool_calls", None):  # servers' responses hold an empty list
        given["tool_calls"] = [_with_parsed_arguments(call) for call in calls] if isinstance(calls, list) else calls
        given["content"] = "" if given.get("content") is None else given["content"]
    message = {key: given[key] for key in MESSAGE_KEYS if key in given}
    content = message.get("content")
    if isinstance(content, list):
        return _joined(message, content)
    if not isinstance(content, str):
        raise BadRow("content", f"a message of {given['role']} must have a content, a text, got {str(content)[:60]!r}")
    return message, []


def _joined(message: dict[str, Any], parts: list[Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a message with its parts as one text, and references to the images and sounds in it."""
    texts, media = [], []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise BadRow("part", f"a part of type text must hold a text, got {str(part)[:60]!r}")
            texts.append(part["text"])
        elif kind in IMAGE_PARTS + SOUND_PARTS and message["role"] == "user":
            texts.append(OBJECT)
            media.append(_reference(part, is_image=kind in IMAGE_PARTS))
        else:
            found = f"a message of {message['role']} has a part of type {kind}; only users send images and sounds"
            raise BadRow("part", found)
    if media and any(OBJECT in text for text in texts if text != OBJECT):
        raise BadRow("part", "a text next to images or sounds holds U+FFFC, which marks the place of one")
    return message | {"content": "".join(texts)}, media


def _parse_tools(value: Any) -> list[Any]:
    """Return the tools of a row: a list of objects, or a text with one in JSON, as some data sets keep it."""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("tools", f"tools must be a list of objects such as {{type, function}}, got {str(value)[:60]!r}")
    return tools


def _with_parsed_arguments(call: Any) -> Any:
    """Return a call of a tool with its arguments as an object, which chat templates and engines work on: logs have them as JSON
    in a text, which a template would quote once more. What is no such call stays as it is.
    """
    function: Any = call.get("function", call) if isinstance(call, dict) else None
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    parsed = {**function, "arguments": arguments}
    return parsed if function is call else {**call, "function": parsed}


def _reference(part: Mapping[str, Any], *, is_image: bool) -> str:
    given = next((part[key] for key in (IMAGE_KEYS if is_image else SOUND_KEYS) if part.get(key)), None)
    reference = given.get("url") if isinstance(given, Mapping) else given
    if not is_image and isinstance(given, Mapping) and "data" in given:
        if given.get("format") != "wav":
            raise BadRow("part", f"a sound has format {str(given.get('format'))[:60]!r}; wav is read")
        reference = f"data:audio/wav;base64,{given['data']}"
    if not isinstance(reference, str) or not reference:
        kind = "an image" if is_image else "a sound"
        raise BadRow("part", f"{kind} must be named by a path, a data URL or a URL, got {str(given)[:60]!r}")
    return reference if is_image else SOUND + reference


# --- rows of token ids: the messages are spelled in ids, so that they are read as they were served, by no tokenizer ---


def chat_in_ids(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a row of ids; `BadRow` where these are none, or none is to be learnt."""
    if row.get("loss_mask") is None:
        sample = f" #{row['sample']}" if row.get("sample") is not None else ""
        answer = () if row.get("answer_ids") is None else (spelled(_ids(row, "answer_ids")),)
        return _messages(spelled(_ids(row, "prompt_ids")) + sample, *answer)
    ids = _ids(row, "token_ids" if row.get("input_ids") is None else "input_ids")
    edges = [0, *chain.from_iterable(spans_of(_flags(row["loss_mask"], len(ids))))]
    if len(edges) == 1:
        raise BadRow("nothing_learnt", "loss_mask must mark an id after the first, and marks none")
    return _messages(*(spelled(ids[start:end]) for start, end in pairwise(edges)))


def _messages(*texts: str) -> list[Message]:
    return [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)]


def _ids(row: Mapping[str, Any], key: str) -> list[int]:
    ids = _flat(row.get(key))
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise BadRow("ids", f"{key} must be a list of token ids, at least one, got {str(ids)[:60]!r}")
    return ids


def _flags(given: Any, length: int) -> list[bool]:
    """Return which ids were written by the target; the first one was not, which nothing predicts."""
    mask = _flat(given)
    if not isinstance(mask, list) or len(mask) != length or not all(flag in (0, 1) for flag in mask):
        raise BadRow("loss_mask", f"loss_mask must have 0 or 1 for each of the {length} ids, got {str(given)[:60]!r}")
    return [False, *map(bool, mask[1:])]


def _flat(given: Any) -> Any:
    """Return the only row of a batch of one, as SpecForge keeps its tensors."""
    return given[0] if isinstance(given, list) and len(given) == 1 and isinstance(given[0], list) else given

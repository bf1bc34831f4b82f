"""Prompts: reading them from a JSONL file or a `datasets` data set, and splitting them into a training and a held-out side.

A prompt is one or several user turns, in the `turns` form of MT-bench and Spec-Bench, or chat `messages` that end with the
user. A last message by the assistant is the data set's own answer, used only with `answers.written_by=dataset`.

The split goes by a hash of the text alone, so a prompt stays on its side when prompts are added, removed or reordered, and a
draft trained earlier has never seen what a later split holds out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import read_jsonl
from configs.schema.data import PromptsConfig
from distill.dataset.conversations import Message
from heads.target.loading import Target

GUARD_WORDS = 13  # the length of overlap that counts as contamination in the GPT-3 report (2005.14165, appendix C)
DUPLICATE = "duplicate"
OVERLAP = "overlaps_held_out"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """User turns to be answered one after the other, each after the answers to those before."""

    prompt_id: str
    category: str
    turns: tuple[str, ...]
    history: tuple[Message, ...] = ()  # what went before the first turn: a system message, earlier exchanges
    answer: str | None = field(default=None, compare=False)  # the data set's own, ignored by comparisons

    @property
    def messages(self) -> list[Message]:
        """The conversation up to the first turn, which it ends with."""
        return [*self.history, {"role": "user", "content": self.turns[0]}]

    @property
    def user_text(self) -> str:
        """Everything the user says, one turn a line; the text for the split by hash and the overlap guard."""
        earlier = [message["content"] for message in self.history if message["role"] == "user"]
        return "\n".join([*earlier, *self.turns])


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which prompts are trained on and which are held out, each in the order given, and how many were dropped, by reason."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    dropped: dict[str, int]


def read_prompts(path: Path, *, default_category: str, what: str = "prompt file") -> list[Prompt]:
    """Return the prompts of a JSONL file in file order.

    Each line holds `turns` (a list of texts) or `messages` (a chat that ends with the user, or with the data set's answer);
    `question_id` (or `id`) and `category` may be left out, other keys are ignored.

    Raises:
        InputError: the file is missing or empty, a line (named) holds no prompt, or different prompts share an id.
    """
    prompts: list[Prompt] = []
    seen: dict[str, tuple[int, Prompt]] = {}
    for line, values in read_jsonl(path, what):
        where = f"{what} {path}, line {line}"
        prompt = parse_row(values, default_category=default_category, where=where)
        first_line, first = seen.setdefault(prompt.prompt_id, (line, prompt))
        if first != prompt:
            raise InputError(f"{where}: question_id {prompt.prompt_id!r} was used on line {first_line} for another prompt")
        prompts.append(prompt)
    return prompts


def load_dataset_prompts(config: PromptsConfig) -> list[Prompt]:
    """Return the first `num_prompts` rows of a data set: column `config.field`, with the column `category` where there is one.

    Raises:
        InputError: the data set, its split or the column cannot be had, or a row (named) holds no prompt.
    """
    path = str(config.path)
    rows = load_rows(path, config.subset, config.split, section="prompts")
    columns = rows.column_names
    if config.field not in columns:
        raise InputError(f"data set {path} has no column {config.field!r} (prompts.field); it has {', '.join(columns)}")
    prompts = []
    for number, row in enumerate(islice(rows, config.num_prompts)):
        value = row[config.field]
        is_chat = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
        content = {"messages": value} if is_chat else {"turns": [value] if isinstance(value, str) else value}
        values = {**content, "question_id": f"row-{number}", "category": row.get("category") or config.category}
        where = f"data set {path}, row {number}, column {config.field!r}"
        prompts.append(parse_row(values, default_category=config.category, where=where))
    if not prompts:
        raise InputError(f"data set {path}, split {config.split!r}, is empty")
    return prompts


def encode_prompt(target: Target, prompt: Prompt) -> tuple[int, ...]:
    """Return the token ids of a prompt's first turn in the target's chat template, the assistant's turn opened.

    Raises:
        InputError: they leave no room for an answer in the target's context.
    """
    ids = target.encode_chat(prompt.messages)
    if len(ids) >= target.max_positions:
        raise InputError(
            f"prompt {prompt.prompt_id} has {len(ids)} tokens; the target's context is {target.max_positions}, "
            "and at least one is needed for the answer: shorten it or leave it out"
        )
    return tuple(ids)


def load_rows(path: str, subset: str | None, split: str, *, section: str) -> datasets.Dataset:
    """Open a data set saved by `save_to_disk`, a folder of data files, or one of the Hub.

    Raises:
        InputError: it cannot be had, or has no such split; `section` names the config's section in the complaint.
    """
    try:
        if any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(path)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(path, subset, split=split)
    except KeyError as error:
        raise InputError(f"{section}.split: data set {path} has no split {split!r}; it has {', '.join(loaded)}") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(f"{section}.path: data set {path} could not be loaded: {first_line(error)}") from error


def parse_row(values: Mapping[str, Any], *, default_category: str, where: str) -> Prompt:
    """Return the prompt of a row with `turns` or `messages` (`read_prompts`), or raise `InputError` naming `where`."""
    if ("turns" in values) == ("messages" in values):
        raise InputError(f"{where}: expected either 'turns' or 'messages', got the keys {', '.join(values) or 'none'}")
    turns: tuple[str, ...]
    history: tuple[Message, ...] = ()
    answer: str | None = None
    if "turns" in values:
        turns = _parse_turns(values["turns"], where)
    else:
        history, turns, answer = _parse_messages(values["messages"], where)
    given = values.get("question_id", values.get("id"))
    if isinstance(given, bool) or not isinstance(given, str | int | None) or given == "":
        raise InputError(f"{where}: question_id must be a text or a whole number, got {given!r}")
    category = values.get("category", default_category)
    if not isinstance(category, str):
        raise InputError(f"{where}: category must be a text, got {category!r}")
    prompt_id = str(given) if given is not None else _content_id(history, turns)
    return Prompt(prompt_id=prompt_id, category=category, turns=turns, history=history, answer=answer)


def split_prompts(prompts: Sequence[Prompt], held_out_share: float) -> Split:
    """Drop duplicates, split by hash, and drop from train what shares 13 words in a row with a held-out prompt.

    Raises:
        InputError: no prompt is left on one of the sides.
    """
    distinct = list({_everything_said(prompt): prompt for prompt in reversed(prompts)}.values())[::-1]
    held_out = [prompt for prompt in distinct if hash_position(prompt.user_text) < held_out_share]
    candidates = [prompt for prompt in distinct if hash_position(prompt.user_text) >= held_out_share]
    known = {gram for prompt in held_out for gram in word_grams(prompt.user_text)}
    train = [prompt for prompt in candidates if known.isdisjoint(word_grams(prompt.user_text))]
    dropped = {DUPLICATE: len(prompts) - len(distinct), OVERLAP: len(candidates) - len(train)}
    if not train or not held_out:
        raise InputError(
            f"the split leaves {len(train)} prompts to train on and {len(held_out)} held out of {len(prompts)} (dropped: "
            f"{dropped[DUPLICATE]} duplicates, {dropped[OVERLAP]} that overlap a held-out one); both need at least one: "
            f"change held_out_share, which is {held_out_share}, or give more prompts"
        )
    return Split(train=tuple(train), held_out=tuple(held_out), dropped=dropped)


def hash_position(text: str) -> float:
    """Return a number in [0, 1), uniform over texts; white space and case make no difference."""
    digest = hashlib.sha256(normalise(text).encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


def word_grams(text: str, num_words: int = GUARD_WORDS) -> Iterator[tuple[str, ...]]:
    """Yield every run of `num_words` words, in lower case and without punctuation."""
    words = re.findall(r"\w+", text.casefold())
    return zip(*(words[start:] for start in range(num_words)), strict=False)


def normalise(text: str) -> str:
    """Return a text as it is compared: white space folded, case ignored."""
    return " ".join(text.split()).casefold()


def _parse_turns(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: turns must be a list of at least one text, got {_short(value)}")
    for turn in value:
        if not isinstance(turn, str) or not turn.strip():
            raise InputError(f"{where}: a turn must be a text that is not blank, got {_short(turn)}")
    return tuple(value)


def _parse_messages(value: Any, where: str) -> tuple[tuple[Message, ...], tuple[str, ...], str | None]:
    """Return what goes before the last user message, that message as the one turn, and the answer to it if there is one."""
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: messages must be a list of at least one message, got {_short(value)}")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise InputError(f"{where}: a message must have a role and a content, both texts, got {_short(message)}")
    messages = [{"role": message["role"], "content": message["content"]} for message in value]
    answer = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise InputError(f"{where}: messages must end with a user message that is not blank (one assistant message may follow)")
    return tuple(messages[:-1]), (messages[-1]["content"],), answer


def _content_id(history: Sequence[Message], turns: Sequence[str]) -> str:
    """Name a prompt that brings no id by its content."""
    content = json.dumps([list(history), list(turns)], ensure_ascii=False)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _everything_said(prompt: Prompt) -> str:
    """Return the text by which prompts count as duplicates: unlike the split, it tells system messages apart."""
    history = [f"{message['role']}: {message['content']}" for message in prompt.history]
    return normalise("\n".join([*history, *prompt.turns]))

"""Prompts: reading them from files or a `datasets` data set, and splitting them into a training and a held-out side.

A prompt is one or several user turns, or a chat that ends with the user (`distill.generation.row_formats` lists the forms). A
last message by the assistant is the data set's own answer, used only with `answers.written_by=dataset`.

The split goes by a hash of the text alone, so a prompt stays on its side when prompts are added, removed or reordered, and a
draft trained earlier has never seen what a later split holds out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.schema.data import PromptsConfig, SourceConfig
from distill.dataset.conversations import Message, folded_text, media_names, text_hash
from distill.generation.row_formats import detect_format, fill_template, to_turns_or_messages
from distill.generation.source_files import load_rows, read_source
from heads.frozen.loading import Target

# Of the GPT-3 report (2005.14165, appendix C): the length of overlap that counts as contamination, and in how many texts to
# train on it may stand before it is taken for a phrase that many share, such as the instructions of a template.
GUARD_WORDS, MOST_SHARING = 13, 10
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana and Chinese characters
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
UNCATEGORISED = "uncategorised"  # prompts whose rows name no category
DUPLICATE = "duplicate"
OVERLAP = "overlaps_held_out"
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")  # what a chat template may read
TOO_LONG = "too_long"
TRUNCATED = "truncated"
OUTSIDE_LIMITS = "outside_min_and_max_tokens"

logger = logging.getLogger("draftsmith")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """User turns to be answered one after the other, each after the answers to those before."""

    prompt_id: str
    category: str
    turns: tuple[str, ...]
    history: tuple[Message, ...] = ()  # what went before the first turn: a system message, earlier exchanges
    tools: tuple[dict[str, Any], ...] = ()  # that the assistant may call, as OpenAI describes them
    media: tuple[str, ...] = ()  # references as of `MediaPrompt`, in the order of their places in the texts
    answer: str | None = field(default=None, compare=False)  # the data set's own, ignored by comparisons
    where: str = field(default="", compare=False)  # file and line, for messages
    source: str = field(default="", compare=False)  # its name, where there are several
    max_new_tokens: int | None = field(default=None, compare=False)  # of its answers; None: answers.max_new_tokens

    @property
    def messages(self) -> list[Message]:
        """The conversation up to the first turn, which it ends with."""
        return [*self.history, {"role": "user", "content": self.turns[0]}]

    @property
    def label(self) -> str:
        """Its id, and where it stands, for messages."""
        return f"prompt {self.prompt_id} ({self.where})" if self.where else f"prompt {self.prompt_id}"

    @property
    def user_text(self) -> str:
        """Everything the user says, one turn a line; the text for the overlap guard."""
        return self.user_texts[-1]

    @property
    def opening(self) -> str:
        """What the user says first, and the media, one a line: the same for all requests of one growing chat."""
        said = [message["content"] for message in self.history if message["role"] == "user"]
        return "\n".join([*said, *self.turns][:1] + media_names(self.media))

    @property
    def user_texts(self) -> list[str]:
        """What the user has said at each turn, one message a line: `Conversation.user_text` of the rows made of it."""
        said = [message["content"] for message in self.history if message["role"] == "user"]
        media = media_names(self.media)
        return ["\n".join([*said, *self.turns[: number + 1], *media]) for number in range(len(self.turns))]

    def encoded(self, target: Target) -> list[int]:
        """Return the token ids of its first turn in the target's chat template, the assistant's turn opened.

        Raises:
            InputError: names the prompt; see `Target.encode_chat`.
        """
        try:
            return target.encode_chat(self.messages, tools=self.tools, media=self.media)
        except InputError as error:
            raise InputError(f"{self.label}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which prompts are trained on and which are held out, each in the order given, and how many were dropped, by reason."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    dropped: dict[str, int]


def read_prompts(config: PromptsConfig) -> list[Prompt]:
    """Return the prompts of `config.path`, a file or a folder of files (`distill.generation.source_files`), in order.

    Raises:
        InputError: there is none, a row (named) holds no prompt, different prompts share an id, or no row has the column named.
    """
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
    if _names_a_column(config) and not formats["column"]:
        raise InputError(
            f"prompts.field: no row of prompt file {config.path} has {config.field!r}; the last has {', '.join(row)}"
        )
    counts = ", ".join(f"{count:,} as {name}" for name, count in formats.most_common())
    logger.info("prompt file %s: read %s", config.path, counts)
    return prompts


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Which prompts of one of several sources are taken: those within its limits that no source had before.

    Args:
        target: in whose chat template they are measured.
        source: has the limits.
        taken: the prompts of all sources so far, by everything said; admitted ones are added.
    """

    target: Target
    source: SourceConfig
    taken: set[str]

    def objection(self, prompt: Prompt) -> str | None:
        """Admit a prompt, or return why it is left out."""
        least, most = self.source.min_tokens, self.source.max_tokens
        if least is not None or most is not None:
            length = len(prompt.encoded(self.target))
            if length < (least or 0) or (most is not None and length > most):
                return OUTSIDE_LIMITS
        said = everything_said(prompt)
        if said in self.taken:
            return DUPLICATE
        self.taken.add(said)
        return None

    def first(
        self, given: Iterable[Prompt], settings: PromptsConfig, max_new_tokens: int
    ) -> tuple[list[Prompt], dict[str, int]]:
        """Return the first prompts that fit and are admitted, as many as the settings say, and how many did not."""
        prompts: list[Prompt] = []
        dropped = Counter[str]()
        for each in given:
            fitting, changed = fit_prompts(self.target, [each], settings.on_too_long, max_new_tokens)
            reasons = [reason for reason in map(self.objection, fitting) if reason is not None]
            dropped.update(changed)
            dropped.update(reasons)
            prompts += [] if reasons else fitting
            if len(prompts) == settings.num_prompts:
                break
        return prompts, dict(dropped)

    def named(self, prompt: Prompt) -> Prompt:
        """Return a prompt under the name of its source, which has ids of its own, with the limit of its answers."""
        name = self.source.name
        return replace(prompt, prompt_id=f"{name}/{prompt.prompt_id}", source=name, max_new_tokens=self.source.max_new_tokens)


def load_dataset_prompts(config: PromptsConfig) -> list[Prompt]:
    """Return the first `num_prompts` rows of a data set; see `dataset_prompts`."""
    return list(islice(dataset_prompts(config), config.num_prompts))


def dataset_prompts(config: PromptsConfig) -> Iterator[Prompt]:
    """Yield the rows of a data set, whose prompts stand in the column `config.field`, if it has one.

    Raises:
        InputError: the data set, its split or the column cannot be had, or a row (named) holds no prompt.
    """
    path = str(config.path)
    rows = load_rows(path, config.subset, config.split, revision=config.revision, section="prompts")
    if config.template is None and config.format == "auto" and config.field in rows.column_names:
        config = config.model_copy(update={"format": "column"})
    elif _names_a_column(config):
        columns = ", ".join(rows.column_names)
        raise InputError(f"prompts.field: data set {path} has no column {config.field!r}; there are {columns}")
    if not len(rows):
        raise InputError(f"data set {path}, split {config.split!r}, is empty")
    for number, row in enumerate(rows):
        yield _read_row({**row, "question_id": f"row-{number}"}, config, f"data set {path}, row {number}")[0]


def _read_row(row: Mapping[str, Any], config: PromptsConfig, where: str) -> tuple[Prompt, str]:
    """Return the prompt of a row, and the format it was read in."""
    setting = "prompts.field"
    format: str = config.format
    if config.template is not None:
        row, format = {**row, config.field: fill_template(config.template, row, where, "prompts.template")}, "column"
    elif format == "auto":  # a column that is named goes before what the other keys say
        named = _names_a_column(config) and config.field in row
        format = "column" if named else detect_format(row, where, setting)
    values = to_turns_or_messages(row, format, where, column=config.field, answer_column=config.answer_field, setting=setting)
    return parse_row(values, default_category=config.category or UNCATEGORISED, where=where), format


def _names_a_column(config: PromptsConfig) -> bool:
    """Return whether the config names a column that has the prompt, or its answer, and leaves the format open."""
    named = config.field != PromptsConfig().field or config.answer_field is not None
    return config.format == "auto" and config.template is None and named


def encode_prompt(target: Target, prompt: Prompt) -> tuple[int, ...]:
    """Return the token ids of a prompt's first turn in the target's chat template, the assistant's turn opened.

    Raises:
        InputError: they leave no room for an answer in the target's context.
    """
    ids = prompt.encoded(target)
    if len(ids) >= target.max_positions:
        raise InputError(
            f"{prompt.label} has {len(ids)} tokens; the target's context is {target.max_positions}, "
            "and at least one is needed for the answer: shorten it, or set on_too_long to skip or truncate"
        )
    return tuple(ids)


def fit_prompts(
    target: Target, prompts: Sequence[Prompt], on_too_long: str, max_new_tokens: int
) -> tuple[list[Prompt], dict[str, int]]:
    """Leave out or shorten the prompts that fill the target's context, as `on_too_long` says.

    A shortened prompt loses the middle of its last user message: what is to be done with a long text stands before or after it.

    Args:
        target: what they are encoded for.
        prompts: of any length.
        on_too_long: refuse, which leaves them to `encode_prompt`; skip; or truncate, or skip where that is not enough.
        max_new_tokens: room that is left for the answer to a shortened one, but not more than half of the context.

    Returns:
        The prompts, and how many were skipped and shortened.
    """
    if on_too_long == "refuse":
        return list(prompts), {}
    kept: list[Prompt] = []
    changed = Counter[str]()
    for prompt in prompts:
        excess = len(prompt.encoded(target)) - target.max_positions + 1
        if excess <= 0:
            kept.append(prompt)
            continue
        if on_too_long == "truncate" and not prompt.media:
            shorter = _truncated(target, prompt, excess + min(max_new_tokens, target.max_positions // 2))
            if len(shorter.encoded(target)) < target.max_positions:  # else what goes before its last message fills it
                kept.append(shorter)
                changed[TRUNCATED] += 1
                continue
        changed[TOO_LONG] += 1
    return kept, dict(changed)


def _truncated(target: Target, prompt: Prompt, excess: int) -> Prompt:
    """Return a prompt with at least `excess` tokens of its first turn left out, or as many as it has."""
    first, *later = prompt.turns
    ids = target.tokenizer(first, add_special_tokens=False)["input_ids"]
    kept = max(2, len(ids) - excess - 4)  # cutting a text may give a few tokens more
    ends = (str(target.tokenizer.decode(part)) for part in (ids[: kept // 2], ids[len(ids) - kept // 2 :]))
    return replace(prompt, turns=(" ... ".join(ends), *later))


def parse_row(values: Mapping[str, Any], *, default_category: str, where: str) -> Prompt:
    """Return the prompt of a row with `turns` or `messages`, or raise `InputError` naming `where`."""
    turns: tuple[str, ...]
    history: tuple[Message, ...] = ()
    answer: str | None = None
    if "turns" in values:
        turns = _parse_turns(values["turns"], where)
    else:
        history, turns, answer = _parse_messages(values["messages"], where)
    given = values.get("question_id")
    if isinstance(given, bool) or not isinstance(given, str | int | None) or given == "":
        raise InputError(f"{where}: question_id must be a text or a whole number, got {given!r}")
    category = values.get("category", default_category)
    if not isinstance(category, str):
        raise InputError(f"{where}: category must be a text, got {category!r}")
    tools = tuple(values.get("tools", ()))
    media = tuple(each for message in values.get("messages", ()) for each in message.get("media", ()))
    prompt_id = str(given) if given is not None else _content_id(history, turns, [*tools, *media])
    prompt = Prompt(
        prompt_id=prompt_id, category=category, turns=turns, history=history, tools=tools, answer=answer, where=where
    )
    return replace(prompt, media=media) if media else prompt


def split_prompts(prompts: Sequence[Prompt], held_out_share: float) -> Split:
    """Drop duplicates, split by `split_positions`, so that requests of one growing chat stand on one side, and drop from
    train what overlaps a held-out prompt: shares a whole turn, all its words,
    or 13 of them in a row, unless these stand in more than `MOST_SHARING` prompts that would be trained on.

    Raises:
        InputError: no prompt is left on one of the sides.
    """
    distinct = list({everything_said(prompt): prompt for prompt in reversed(prompts)}.values())[::-1]
    placed = list(zip(distinct, split_positions(distinct), strict=True))
    held_out = [prompt for prompt, position in placed if position < held_out_share]
    candidates = [prompt for prompt, position in placed if position >= held_out_share]
    known = {gram for prompt in held_out for gram in _guarded(prompt)}
    sharing = Counter(gram for prompt in candidates for gram in known.intersection(_guarded(prompt)))
    known -= {gram for gram, count in sharing.items() if len(gram) == GUARD_WORDS and count > MOST_SHARING}
    asked = {text_hash(text) for prompt in held_out for text in prompt.user_texts}
    train = [
        prompt
        for prompt in candidates
        if known.isdisjoint(_guarded(prompt)) and asked.isdisjoint(map(text_hash, prompt.user_texts))
    ]
    dropped = {DUPLICATE: len(prompts) - len(distinct), OVERLAP: len(candidates) - len(train)}
    if not train or not held_out:
        raise InputError(
            f"the split leaves {len(train)} prompts to train on and {len(held_out)} held out of {len(prompts)} (dropped: "
            f"{dropped[DUPLICATE]} duplicates, {dropped[OVERLAP]} that overlap a held-out one); both need at least one: "
            f"change held_out_share, which is {held_out_share}, or give more prompts"
        )
    return Split(train=tuple(train), held_out=tuple(held_out), dropped=dropped)


def split_positions(prompts: Sequence[Prompt]) -> list[float]:
    """Return where each prompt stands in the split, in [0, 1): by what its user says first and its media; by all that the user
    says where more than `MOST_SHARING` prompts open so, which is a template rather than one chat.
    """
    shared = Counter(map(text_hash, (prompt.opening for prompt in prompts)))
    return [
        hash_position(prompt.opening if shared[text_hash(prompt.opening)] <= MOST_SHARING else prompt.user_text)
        for prompt in prompts
    ]


def _guarded(prompt: Prompt) -> list[tuple[str, ...]]:
    """Return what no prompt to train on may share with a held-out one: runs of words or the whole of a shorter text; its media,
    where it has any.
    """
    if prompt.media:
        return [(name,) for name in media_names(prompt.media)]
    whole = tuple(_words(prompt.user_text))
    return list(word_grams(prompt.user_text)) if len(whole) >= GUARD_WORDS else [whole] * bool(whole)


def hash_position(text: str) -> float:
    """Return a number in [0, 1), uniform over texts; white space and case make no difference."""
    return ((text_hash(text) % 2**64) >> 11) * 2.0**-53


def word_grams(text: str, num_words: int = GUARD_WORDS) -> Iterator[tuple[str, ...]]:
    """Yield every run of `num_words` words, in lower case and without punctuation.

    Chinese and Japanese put no spaces between words: each of their characters counts as one.
    """
    words = _words(text)
    return zip(*(words[start:] for start in range(num_words)), strict=False)


def _words(text: str) -> list[str]:
    return WORD.findall(text.casefold())


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
    messages = [{key: message[key] for key in MESSAGE_KEYS if key in message} for message in value]
    answer = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise InputError(f"{where}: messages must end with a user message that is not blank (one assistant message may follow)")
    return tuple(messages[:-1]), (messages[-1]["content"],), answer


def _content_id(history: Sequence[Message], turns: Sequence[str], tools: Sequence[Any]) -> str:
    """Name a prompt that brings no id by its content."""
    content = json.dumps([list(history), list(turns), *tools], ensure_ascii=False)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def everything_said(prompt: Prompt) -> str:
    """Return the text by which prompts count as duplicates: unlike the split, it tells system messages and tools apart."""
    history = [f"{message['role']}: {message['content']}" for message in prompt.history]
    return folded_text("\n".join([*map(str, prompt.tools), *media_names(prompt.media), *history, *prompt.turns]))

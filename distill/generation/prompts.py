"""Prompts that a target is to answer: their token ids, those that do not fit its context, near-duplicates, and the two sides.

A prompt is one or several user turns, or a chat that ends with the user (`distill.generation.row_forms` lists the forms). The
split goes by a hash of the text alone, so a prompt stays on its side when prompts are added, removed or reordered, and a draft
trained earlier has never seen what a later split holds out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from configs.runtime.errors import InputError
from distill.dataset.conversations import Message, answer_places, folded_text, media_names, text_hash
from distill.generation.bad_rows import TOO_LONG, BadRow, LeftOut
from distill.generation.rendering import Omissions
from heads.frozen.loading import Target
from heads.frozen.tokenizer import OBJECT

UNCATEGORISED = "uncategorised"  # prompts whose rows name no category
DUPLICATE = "duplicate"
NOT_ENCODED = "not_encoded"  # the chat template refuses it, or the tokenizer has no token for a part of it
# Of the GPT-3 report (2005.14165, appendix C): the length of overlap that counts as contamination, and in how many texts to
# train on it may stand before it is taken for a phrase that many share, such as the instructions of a template.
GUARD_WORDS, MAX_SHARING = 13, 10
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana and Chinese characters
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
OVERLAP = "overlaps_held_out"
NEAR_SHARE, NEAR_WORDS = 0.5, 4  # near-duplicates share this part of the runs of so many words that either has


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """User turns to be answered one after the other, each after the answers to those before."""

    prompt_id: str
    category: str
    turns: tuple[str, ...]
    history: tuple[Message, ...] = ()  # what went before the first turn: a system message, earlier exchanges
    tools: tuple[dict[str, Any], ...] = ()  # that the assistant may call, as OpenAI describes them
    media: tuple[str, ...] = ()  # references as of `MediaPrompt`, in the order of their places in the texts
    # Of the first turn's message where that is no user's but a tool's result: its role, and what else it has
    turn_keys: Message = field(default_factory=dict)
    answer: str | None = field(default=None, compare=False)  # the data set's own, ignored by comparisons
    answer_keys: Message = field(default_factory=dict, compare=False)  # what else its message has: reasoning, calls of tools
    of_ids: bool = False  # its messages are spelled in token ids (`distill.generation.row_forms`)
    where: str = field(default="", compare=False)  # file and line, for messages
    num_tokens: int = field(default=0, compare=False)  # up to the first answer, in the target's chat template; 0: not counted

    @property
    def messages(self) -> list[Message]:
        """The conversation up to the first turn, which it ends with."""
        return [*self.history, {"role": "user", **self.turn_keys, "content": self.turns[0]}]

    def below(self, system: str | None) -> Prompt:
        """Return the prompt after this system message, if any is given and it has none."""
        if system is None or self.of_ids or any(message["role"] == "system" for message in self.history):
            return self
        return replace(self, history=({"role": "system", "content": system}, *self.history))

    @property
    def user_text(self) -> str:
        return self.user_texts[-1]

    @property
    def opening(self) -> str:
        """What the user says first, and the media, one a line: the same for all requests of one growing chat."""
        return "\n".join([*self._said, *self.turns][:1] + media_names(self.media))

    @property
    def user_texts(self) -> list[str]:
        """What the user has said at each turn, one message a line: `Conversation.user_text` of the rows made of it."""
        said, media = self._said, media_names(self.media)
        return ["\n".join([*said, *self.turns[1 : number + 1], *media]) for number in range(len(self.turns))]

    def text_of(self, target: Target, messages: Sequence[Message], *, answer_follows: bool = True) -> str:
        """Return the text of a chat with its tools and media in the target's template, or the ids that it is spelled in."""
        if self.of_ids:
            return "\n".join(message["content"] for message in messages)
        return target.chat_text(messages, tools=self.tools, answer_follows=answer_follows, media=self.media)

    def encode(self, target: Target, text: str) -> list[int]:
        """Return the token ids of such a text."""
        return ids_in(text, target.vocab_size) if self.of_ids else target.encode(text, self.media)

    @property
    def _said(self) -> list[str]:
        return [message["content"] for message in self.messages if message["role"] == "user"]


def encode_prompt(
    target: Target, prompt: Prompt, omissions: Omissions | None = None, max_tokens: int | None = None
) -> tuple[int, ...]:
    """Return the token ids of a prompt's first turn in the target's chat template, the assistant's turn opened.

    `BadRow` where there are none, or too many; `omissions` notes what the template leaves out.
    """
    try:
        text = prompt.text_of(target, prompt.messages)
        ids = prompt.encode(target, text)
    except InputError as error:
        raise BadRow(NOT_ENCODED, f"prompt {prompt.prompt_id}: {error}", prompt.where) from error
    if len(ids) >= target.max_positions or len(ids) > (max_tokens or len(ids)):
        limits = f"the target's context is {target.max_positions}, max_prompt_tokens is {max_tokens}"
        raise BadRow(TOO_LONG, f"prompt {prompt.prompt_id} has {len(ids)} tokens; {limits}", prompt.where)
    if omissions is not None:
        omissions.note(text, prompt.messages, prompt.tools, prompt.where)
    return tuple(ids)


def fit_prompts(
    target: Target,
    prompts: Sequence[Prompt],
    left_out: LeftOut,
    max_tokens: int | None = None,
    *,
    shortens: bool = False,
) -> list[Prompt]:
    """Return the prompts that can be asked, with their lengths; others are counted, or refused.

    `shortens`: of a chat that is too long, the longest beginning that ends with one of its turns and is not takes its place.
    """
    kept, omissions = [], Omissions()
    for prompt in prompts:
        try:
            ids = encode_prompt(target, prompt, omissions, max_tokens)
        except BadRow as error:
            shorter = turns_of(prompt)[:-1] if shortens and error.reason == TOO_LONG else ()
            fitting = fit_prompts(target, shorter, LeftOut(on_too_long="skip", on_bad_row="skip"), max_tokens)
            kept += fitting[-1:]
            if not fitting:
                left_out.add(error)
        else:
            kept.append(replace(prompt, num_tokens=len(ids)))
    omissions.warn()
    return kept


def choose_prompts(prompts: Sequence[Prompt], number: int) -> list[Prompt]:
    """Return so many different prompts in their order, or all: those of a smaller number are among those of a larger one.

    They are drawn by a hash of all that each says, another one than that of the split.
    """
    if number >= len(prompts):
        return list(prompts)
    positions = [hash_position(f"drawn {everything_said(prompt)}") for prompt in prompts]
    drawn = set(sorted(set(positions))[:number])
    return [prompt for prompt, position in zip(prompts, positions, strict=True) if position in drawn]


def fold_chats(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Leave out the prompts of a request log that are the beginning of a chat which another one holds whole.

    A prompt with an answer of its own stays where the other chat goes on from another answer.
    """
    going_on: dict[str, set[str]] = {}  # the beginning of a chat -> how it was answered
    for prompt in prompts:
        chat, starts = prompt.messages, _beginnings(prompt)
        for number, message in enumerate(chat[1:], 1):
            going_on.setdefault(starts[number - 1], set()).add(message["content"])

    def is_held(prompt: Prompt) -> bool:
        answers = going_on.get(_beginnings(prompt)[-1], set()) if len(prompt.turns) == 1 else set()
        return bool(answers) and (prompt.answer is None or prompt.answer in answers)

    return [prompt for prompt in prompts if not is_held(prompt)]


def _beginnings(prompt: Prompt) -> list[str]:
    """Return a hash of a chat up to each of its messages, of what a request log repeats of them in the next request."""
    total, found = hashlib.sha256(json.dumps([prompt.tools, prompt.media]).encode()), []
    for message in prompt.messages:
        total.update(json.dumps([message["role"], message["content"]]).encode())
        found.append(total.hexdigest())
    return found


def everything_said(prompt: Prompt) -> str:
    """Return the text by which prompts count as duplicates: unlike the split, it tells system messages and tools apart."""
    history = [f"{message['role']}: {message['content']}" for message in prompt.history]
    return folded_text("\n".join([*map(str, prompt.tools), *media_names(prompt.media), *history, *prompt.turns]))


# --- the split


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which prompts are trained on, in the order given, which are held out, and how many were dropped, by reason.

    Held-out prompts are in the order of the hash that splits them, so that the first are a sample of all sources.
    """

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    dropped: dict[str, int]


def split_prompts(prompts: Sequence[Prompt], held_out_share: float) -> Split:
    """Drop duplicates, split by `split_positions`, and drop from train what overlaps a held-out prompt.

    An overlap is a whole turn, all words, or 13 of them in a row, unless these stand in more than `MAX_SHARING` prompts that
    would be trained on.
    """
    distinct = without_duplicates(prompts)
    placed = list(zip(distinct, split_positions(distinct), strict=True))
    held_out = [prompt for prompt, position in sorted(placed, key=itemgetter(1)) if position < held_out_share]
    candidates = [prompt for prompt, position in placed if position >= held_out_share]
    known = {gram for prompt in held_out for gram in _guarded(prompt)}
    sharing = Counter(gram for prompt in candidates for gram in known.intersection(_guarded(prompt)))
    known -= {gram for gram, count in sharing.items() if len(gram) == GUARD_WORDS and count > MAX_SHARING}
    asked = {text_hash(text) for prompt in held_out for text in prompt.user_texts}
    train = [
        prompt
        for prompt in candidates
        if known.isdisjoint(_guarded(prompt)) and asked.isdisjoint(map(text_hash, prompt.user_texts))
    ]
    dropped = {DUPLICATE: len(prompts) - len(distinct), OVERLAP: len(candidates) - len(train)}
    if not train or not held_out:
        sides = f"{len(train)} prompts to train on and {len(held_out)} held out of {len(prompts)} (dropped: {dropped})"
        raise InputError(f"held_out_share: {held_out_share} leaves {sides}; both need at least one")
    return Split(train=tuple(train), held_out=tuple(held_out), dropped=dropped)


def without_duplicates(prompts: Sequence[Prompt]) -> list[Prompt]:
    return list({everything_said(prompt): prompt for prompt in reversed(prompts)}.values())[::-1]


def share_for(prompts: Sequence[Prompt], num_held_out: int) -> float:
    """Return the share by which `split_prompts` holds out so many of these prompts, or some more that open alike."""
    positions = sorted(set(split_positions(without_duplicates(prompts))))
    last = min(num_held_out, len(positions) - 1)
    return (positions[last - 1] + positions[last]) / 2


def split_positions(prompts: Sequence[Prompt]) -> list[float]:
    """Return where each prompt stands in the split, in [0, 1): by what its user says first and its media; by all that the user
    says where more than `MAX_SHARING` prompts open so, which is a template rather than one chat.
    """
    shared = Counter(map(text_hash, (prompt.opening for prompt in prompts)))
    return [
        hash_position(prompt.opening if shared[text_hash(prompt.opening)] <= MAX_SHARING else prompt.user_text)
        for prompt in prompts
    ]


def _guarded(prompt: Prompt) -> list[tuple[str, ...]]:
    """Return what no prompt to train on may share with a held-out one: runs of words or the whole of a shorter text; its media,
    where it has any.
    """
    if prompt.media:
        return [(name,) for name in media_names(prompt.media)]
    words = WORD.findall(prompt.user_text.casefold())
    return list(word_grams(prompt.user_text)) if len(words) >= GUARD_WORDS else [tuple(words)] * bool(words)


def hash_position(text: str) -> float:
    """Return a number in [0, 1), uniform over texts; white space and case make no difference."""
    return ((text_hash(text) % 2**64) >> 11) * 2.0**-53


def word_grams(text: str, num_words: int = GUARD_WORDS) -> Iterator[tuple[str, ...]]:
    """Yield every run of `num_words` words, in lower case and without punctuation; a Chinese character is a word."""
    words = WORD.findall(text.casefold())
    return zip(*(words[start:] for start in range(num_words)), strict=False)


class NearDuplicates:
    """Prompts so far, by their runs of four words; those of fewer words are near to none."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._having: dict[tuple[str, ...], list[int]] = {}

    def add(self, text: str) -> bool:
        """Add a prompt, unless one so far shares `NEAR_SHARE` of its runs; return whether it was added."""
        grams = set(word_grams(text, NEAR_WORDS))
        shared = Counter(place for gram in grams for place in self._having.get(gram, ()))
        if any(count >= NEAR_SHARE * (len(grams) + self._sizes[place] - count) for place, count in shared.items()):
            return False
        for gram in grams:
            self._having.setdefault(gram, []).append(len(self._sizes))
        self._sizes.append(len(grams))
        return True


# --- a chat as its turns --------------------------------------------------------------------------------------------


def turns_of(prompt: Prompt) -> list[Prompt]:
    """Return a prompt for each message to be answered, in order; what a source says after its last answer is one of them.

    Of a prompt that is a list of user turns the later ones have no answers in their history: these are yet to be written.
    """
    asked, answer = prompt.messages, answer_of(prompt)
    chat = asked if answer is None else [*asked, answer]
    places = answer_places(chat) + [len(chat)] * (answer is None)
    turns = [_turn(prompt, chat[: place + 1]) for place in places]
    for text in prompt.turns[1:]:
        turns.append(_turn(prompt, [*turns[-1].messages, {"role": "user", "content": text}]))
    return turns


def answer_of(prompt: Prompt) -> Message | None:
    """Return the message by which a prompt's source answers it."""
    return None if prompt.answer is None else {"role": "assistant", **prompt.answer_keys, "content": prompt.answer}


def said_since(turns: Sequence[Prompt], number: int) -> list[Message]:
    """Return what is said in a turn after the answer to the one before, its own question last."""
    if number == 0:
        return turns[0].messages
    before = turns[number - 1]
    return turns[number].messages[len(before.messages) + (before.answer is not None) :]


def _turn(prompt: Prompt, chat: Sequence[Message]) -> Prompt:
    """Return the prompt of a chat that ends with a question, or with the answer to one."""
    *history, last = chat
    answer: Message = {}
    if last["role"] == "assistant":
        answer, last, history = last, history[-1], history[:-1]
    media = "".join(each["content"] for each in (*history, last) if each["role"] == "user").count(OBJECT)
    return replace(
        prompt,
        turns=(last["content"],),
        history=tuple(history),
        turn_keys={} if last["role"] == "user" else {key: value for key, value in last.items() if key != "content"},
        answer=answer.get("content"),
        answer_keys={key: value for key, value in answer.items() if key not in ("role", "content")},
        media=prompt.media[:media],
    )


# --- messages of token ids ------------------------------------------------------------------------------------------


def spelled(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def ids_in(text: str, vocab_size: int) -> list[int]:
    """Return the ids that a text spells, without what follows a `#` in a line; `InputError` for one beyond the vocabulary."""
    try:
        ids = [int(number) for line in text.splitlines() for number in line.partition("#")[0].split()]
    except ValueError as error:
        raise InputError(f"of_ids: messages must be spelled in token ids: {error}") from error
    if outside := [token for token in ids if not 0 <= token < vocab_size]:
        raise InputError(f"token id {outside[0]} lies outside the target's vocabulary of {vocab_size}")
    return ids

"""Prompts that a target is to answer: their token ids, those that do not fit its context, near-duplicates, and the two sides.

A prompt is one or several user turns, or a chat that ends with the user (`distill.generation.row_forms` lists the forms). The
split goes by a hash of the text alone, so a prompt stays on its side when prompts are added, removed or reordered, and a draft
trained earlier has never seen what a later split holds out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from configs.runtime.errors import InputError
from distill.dataset.conversations import Message, folded_text, media_names, text_hash
from heads.frozen.loading import Target

UNCATEGORISED = "uncategorised"  # prompts whose rows name no category
DUPLICATE = "duplicate"
TOO_LONG = "too_long"
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
    where: str = field(default="", compare=False)  # file and line, for messages

    @property
    def messages(self) -> list[Message]:
        """The conversation up to the first turn, which it ends with."""
        return [*self.history, {"role": "user", **self.turn_keys, "content": self.turns[0]}]

    def below(self, system: str | None) -> Prompt:
        """Return the prompt after this system message, if any is given and it has none."""
        if system is None or any(message["role"] == "system" for message in self.history):
            return self
        return replace(self, history=({"role": "system", "content": system}, *self.history))

    @property
    def label(self) -> str:
        return f"prompt {self.prompt_id} ({self.where})" if self.where else f"prompt {self.prompt_id}"

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

    @property
    def _said(self) -> list[str]:
        return [message["content"] for message in self.messages if message["role"] == "user"]

    def encoded(self, target: Target) -> list[int]:
        """Return the token ids of its first turn in the target's chat template, the assistant's turn opened."""
        try:
            return target.encode_chat(self.messages, tools=self.tools, media=self.media)
        except InputError as error:
            raise InputError(f"{self.label}: {error}") from error


def encode_prompt(target: Target, prompt: Prompt) -> tuple[int, ...]:
    """Return the token ids of a prompt's first turn in the target's chat template, the assistant's turn opened."""
    ids = prompt.encoded(target)
    if len(ids) >= target.max_positions:
        context = f"the target's context is {target.max_positions}"
        raise InputError(f"{prompt.label} has {len(ids)} tokens; {context}: shorten it, or set on_too_long")
    return tuple(ids)


def fit_prompts(target: Target, prompts: Sequence[Prompt], on_too_long: str) -> list[Prompt]:
    """Return the prompts without those that fill the target's context, where `on_too_long` says skip; else `encode_prompt`
    refuses them.
    """
    if on_too_long == "refuse":
        return list(prompts)
    return [prompt for prompt in prompts if len(prompt.encoded(target)) < target.max_positions]


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

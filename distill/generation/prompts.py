"""Prompts: user turns that a target is to answer, their token ids, and those that do not fit its context.

A prompt is one or several user turns, or a chat that ends with the user (`distill.generation.row_formats` lists the forms).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from configs.runtime.errors import InputError
from distill.dataset.conversations import Message, folded_text, media_names
from heads.frozen.loading import Target

UNCATEGORISED = "uncategorised"  # prompts whose rows name no category
DUPLICATE = "duplicate"
TOO_LONG = "too_long"
TRUNCATED = "truncated"


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
        """Its id, and where it stands, for messages."""
        return f"prompt {self.prompt_id} ({self.where})" if self.where else f"prompt {self.prompt_id}"

    @property
    def user_text(self) -> str:
        """Everything the user says, one turn a line; the text for the overlap guard."""
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
        """What the user says up to the first turn."""
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
        raise InputError(
            f"{prompt.label} has {len(ids)} tokens; the target's context is {target.max_positions}, "
            "and at least one is needed for the answer: shorten it, or set on_too_long to skip or truncate"
        )
    return tuple(ids)


def fit_prompts(
    target: Target, prompts: Sequence[Prompt], on_too_long: str, max_new_tokens: int
) -> tuple[list[Prompt], dict[str, int]]:
    """Leave out or shorten the prompts that fill the target's context; return the prompts, and how many were changed, by way.

    `on_too_long` says refuse, which leaves them to `encode_prompt`; skip; or truncate, or skip where that is not enough. A
    shortened prompt loses the middle of its last user message, since what is to be done with a long text stands before or after
    it, so that `max_new_tokens` of an answer fit, but not more than half of the context.
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


def everything_said(prompt: Prompt) -> str:
    """Return the text by which prompts count as duplicates: unlike the split, it tells system messages and tools apart."""
    history = [f"{message['role']}: {message['content']}" for message in prompt.history]
    return folded_text("\n".join([*map(str, prompt.tools), *media_names(prompt.media), *history, *prompt.turns]))

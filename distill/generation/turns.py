"""A chat as its turns: each a prompt of its own, with the chat before it and the answer that its source brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distill.dataset.conversations import Message, answer_places
from distill.generation.prompts import Prompt
from heads.frozen.tokenizer import OBJECT


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

"""Conversations in a tokenizer's chat template, which `target.chat_template` may name in place of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import read_text
from heads.target.identity import TargetIdentity

OBJECT = "\ufffc"  # Unicode's object replacement character: where an image stands in a user's text

# chatml: as of Qwen, SmolLM2 and others. plain: the texts alone, a line each, for base models.
NAMED = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "plain": "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}\n{% endif %}{% endfor %}",
}


def set_chat_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Give a tokenizer a chat template, which becomes part of the target's identity and is saved with a draft LM.

    Where the tokenizer begins every text with a token of its own (its `bos_token`), so does `plain`.

    Args:
        tokenizer: changed in place.
        name: one of `NAMED`, or a Jinja file.

    Raises:
        InputError: it is neither, or the file is no template.
    """
    if name not in NAMED and not Path(name).is_file():
        raise InputError(f"target.chat_template: {name} is neither a file here nor one of {', '.join(NAMED)}")
    template = NAMED[name] if name in NAMED else read_text(Path(name), "chat template")
    if name == "plain":
        begins_texts = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
        template = (str(tokenizer.bos_token) if begins_texts else "") + template
    tokenizer.chat_template = template
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateError as error:
        raise InputError(f"target.chat_template: {name} is no chat template: {first_line(error)}") from error


class Templated(Protocol):
    """What has a chat template: a `heads.target.loading.Target`."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def identity(self) -> TargetIdentity: ...


def in_template(
    target: Templated,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    answer_follows: bool = True,
    in_parts: bool = False,
    images: int = 0,
) -> str:
    """Return the text of a conversation in the chat template.

    Args:
        messages: role and content, and what else the template reads.
        tools: that the assistant may call, as OpenAI describes them, for templates that show them.
        answer_follows: open the assistant's turn.
        in_parts: try lists of parts where the template leaves out a text.
        images: how many there are; each has an `OBJECT` in a user's text.

    Raises:
        InputError: the tokenizer has no chat template, or the template refuses the conversation: some know no system
            message, some ask that user and assistant take turns; or there are not as many places for images.
    """
    name, tokenizer = target.identity.name, target.tokenizer
    if tokenizer.chat_template is None:
        raise InputError(no_chat_template(name))
    plain = [dict(message) for message in messages]

    def render(conversation: list[dict[str, Any]]) -> str:
        given: Any = [dict(tool) for tool in tools] or None
        text = tokenizer.apply_chat_template(conversation, tools=given, add_generation_prompt=answer_follows, tokenize=False)
        return str(text)

    try:
        if images:
            return render(_with_images(plain, images))
        text = render(plain)
        said = plain[-1].get("content") or ""
        if in_parts and said.strip() not in text:  # its template may know lists of parts only
            text = render([each | {"content": [_text_part(each.get("content") or "")]} for each in plain])
        return text
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in plain)
        raise InputError(
            f"the chat template of target {name} refuses a conversation of {roles}: {first_line(error)}"
        ) from error


def no_chat_template(name: str) -> str:
    """Return what is wrong with a tokenizer without one."""
    return (
        f"target {name} has no chat template; conversations cannot be encoded: set target.chat_template to a Jinja file or to "
        "chatml, or for a base model to plain, the texts alone"
    )


def _with_images(conversation: Sequence[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    """Return messages whose contents are lists of parts: texts, and an image at each `OBJECT` of a user's text."""
    messages, found = [], 0
    for message in conversation:
        content = message.get("content") or ""
        pieces = content.split(OBJECT) if message["role"] == "user" else [content]
        parts: list[dict[str, str]] = []
        for number, piece in enumerate(pieces):
            parts += [{"type": "image"}] * (number > 0) + [_text_part(piece)] * bool(piece)
        found += len(pieces) - 1
        messages.append(message | {"content": parts})
    if found != images:
        raise InputError(f"a conversation has {images} images and {found} places for them (U+FFFC in its user's texts)")
    return messages


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}

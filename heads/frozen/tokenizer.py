"""The target's tokenizer, and conversations in its chat template.

With `target.tokens: ids` the tokens are no text (codes of images, codec tokens of speech, class ids) and a prompt is a text of
numbers such as `1034 17 2`, of which whatever follows a `#` in a line is left out (`1034 #17` is the prompt `1034` once more).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import read_text
from configs.schema.target import TargetConfig

SOUND = "sound:"  # before the reference of a sound; that of an image is the path or data URL itself
OBJECT = "\ufffc"  # Unicode's object replacement character: where an image or a sound stands in a user's text

OF_IDS = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"  # of tokens called by their numbers
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError)  # a template's own code raises Python's


# chatml: as of Qwen, SmolLM2 and others. plain: the texts alone, a line each, for base models.
NAMED = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "plain": "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}\n{% endif %}{% endfor %}",
}


def load_tokenizer(path: Path, config: TargetConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer, with the chat template that the config names."""
    tokenizer: PreTrainedTokenizerBase
    if config.tokens == "ids":
        described = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        named = Tokenizer(WordLevel({str(number): number for number in range(described.get_text_config().vocab_size)}))
        named.normalizer, named.pre_tokenizer = Replace(Regex("#[^\n]*"), ""), WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=named, chat_template=OF_IDS)
    if path.suffix == ".gguf":
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    else:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    if config.chat_template is not None:
        set_chat_template(tokenizer, config.chat_template)
    if config.chat_template_kwargs is not None and tokenizer.chat_template is None:
        raise InputError(f"target.chat_template_kwargs: the tokenizer of {config.name} has no chat template; set chat_template")
    tokenizer.chat_template = with_variables(tokenizer.chat_template, config)
    return tokenizer


def with_variables(template: Any, config: TargetConfig) -> Any:
    """Return a chat template, or several by name, that begins with `chat_template_kwargs`.

    In the text of the template they are part of its hash, and of the file that a server is given.
    """
    if isinstance(template, dict):
        return {name: with_variables(each, config) for name, each in template.items()}
    # transformers' templates drop the line break after a block, so that the template begins as before
    given = (config.chat_template_kwargs or {}).items()
    return "".join(f"{{% set {name} = {json.dumps(value)} %}}\n" for name, value in given) + template if given else template


def set_chat_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Give a tokenizer a chat template, one of `NAMED` or a Jinja file; it is part of the target's identity.

    Where the tokenizer begins every text with a token of its own (its `bos_token`), so does `plain`.
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
    except TEMPLATE_ERRORS as error:
        raise InputError(f"target.chat_template: {name} is no chat template: {first_line(error)}") from error


def in_template(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    answer_follows: bool = True,
    in_parts: bool = False,
    media: Sequence[str] = (),
    template: str | None = None,
) -> str:
    """Return the text of a conversation in the chat template, or in `template`.

    `tools` are described as by OpenAI; `media` are references to images and sounds, each of which has an `OBJECT` in a user's
    text. With `in_parts`, contents are tried as lists of parts where the template leaves out a text.
    """
    if tokenizer.chat_template is None:
        raise InputError(no_chat_template(name))
    plain = [{**_reasoning(message), **message} for message in messages]

    def render(conversation: list[dict[str, Any]]) -> str:
        given: Any = [dict(tool) for tool in tools] or None
        settings: Any = {"tools": given, "add_generation_prompt": answer_follows, "tokenize": False}
        return str(tokenizer.apply_chat_template(conversation, chat_template=template, **settings))

    try:
        if media:
            return render(_with_media(plain, media))
        text = render(plain)
        said = plain[-1].get("content") or ""
        if in_parts and said.strip() not in text:  # its template may know lists of parts only
            text = render([each | {"content": [_text_part(each.get("content") or "")]} for each in plain])
        return text
    except TEMPLATE_ERRORS as error:
        roles = ", ".join(message["role"] for message in plain)
        raise InputError(
            f"the chat template of target {name} refuses a conversation of {roles}: {first_line(error)}"
        ) from error


def _reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the assistant thought under the other names that templates read it by, such as gpt-oss's `thinking`."""
    reasoning = message.get("reasoning_content")
    return {"thinking": reasoning, "reasoning": reasoning} if reasoning else {}


def no_chat_template(name: str) -> str:
    return (
        f"target {name} has no chat template; conversations cannot be encoded: set target.chat_template to a Jinja file or to "
        "chatml, or for a base model to plain, the texts alone"
    )


def _with_media(conversation: Sequence[dict[str, Any]], media: Sequence[str]) -> list[dict[str, Any]]:
    """Return messages whose contents are lists of parts: texts, and an image or a sound at each `OBJECT` of a user's text."""
    found = sum((each.get("content") or "").count(OBJECT) for each in conversation if each["role"] == "user")
    if found != len(media):
        raise InputError(
            f"a conversation has {len(media)} images or sounds and {found} places for them (U+FFFC in its user's texts)"
        )
    messages, left = [], iter(media)
    for message in conversation:
        content = message.get("content") or ""
        pieces = content.split(OBJECT) if message["role"] == "user" else [content]
        parts: list[dict[str, str]] = []
        for number, piece in enumerate(pieces):
            if number:  # some templates look for the key `audio`
                parts.append({"type": "audio", "audio": ""} if next(left).startswith(SOUND) else {"type": "image"})
            parts += [_text_part(piece)] * bool(piece)
        messages.append(message | {"content": parts})
    return messages


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}

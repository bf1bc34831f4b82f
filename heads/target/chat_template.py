"""The chat template that `target.chat_template` names, for a tokenizer that has none or is to have another."""

from __future__ import annotations

from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import read_text

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

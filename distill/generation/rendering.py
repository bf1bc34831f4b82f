"""A conversation and its text in the chat template: what the template leaves out, what of it is the answer, and the way back
from an answer's tokens to a message.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.runtime.errors import InputError
from distill.dataset.conversations import Message
from heads.frozen.loading import Target
from heads.frozen.tokenizer import OBJECT

logger = logging.getLogger("draftsmith")

SENTINEL = "AN-ANSWER"
THINK, THOUGHT = "<think>", "</think>"  # around what a model thinks, in most templates
# In harmony, the format of gpt-oss, an answer has parts: analysis, commentary (calls of tools) and final.
CHANNEL = re.compile(r"<\|channel\|>(\w+).*?<\|message\|>(.*?)(?=<\|(?:end|return|call|start|channel)\|>|$)", re.DOTALL)
ANALYSIS, FINAL = "analysis", "final"


class Omissions:
    """Counts conversations of which a chat template leaves something out, by what that is."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self._first: dict[str, str] = {}

    def note(self, text: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], where: str) -> None:
        """Count what is said in a conversation and does not stand in its `text`; `where` is its place."""
        for what in sorted({what for what, said in _said(messages, tools) if not _stands_in(text, said)}):
            self.counts[what] += 1
            self._first.setdefault(what, where)

    def warn(self) -> None:
        """Log the counts, each with the first place."""
        for what, count in self.counts.items():
            found = f"{count} conversations, the first at {self._first[what]}"
            logger.warning("the target's chat template leaves out %s of %s: the draft will not learn from it", what, found)


def _said(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield what a template should write, and what that is. Earlier thinking is not among it, which most leave out."""
    for number, message in enumerate(messages):
        role, content = message["role"], message["content"]
        thought, _, visible = content.rpartition(THOUGHT) if role == "assistant" else ("", "", content)
        yield from ((f"a message of role {role}", piece) for piece in visible.split(OBJECT))
        if number == len(messages) - 1 and role == "assistant":
            yield "reasoning_content", message.get("reasoning_content") or thought.replace(THINK, "")
        calls = message.get("tool_calls") or ()
        yield from (("tool_calls", _name(call)) for call in calls)
    yield from (("tools", _name(tool)) for tool in tools)


def _name(described: Any) -> str:
    """Return the name of a tool, or of the tool that is called."""
    function = described.get("function", described) if isinstance(described, Mapping) else {}
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def _stands_in(text: str, said: str) -> bool:
    said = said.strip()
    return said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text  # some write tools' results as JSON


def answer_text(asked: str, whole: str, messages: Sequence[Message]) -> str | None:
    """Return the text of the answer, with its end, that the target would write after the prompt; None where there is none.

    `asked` is the text of the prompt, `whole` that of the `messages`, which end with the answer. The two may differ before the
    last question, where a template writes something before the last message alone, such as Mistral's system message. Where the
    prompt opens the thinking and the template leaves it out of the answer, as of DeepSeek-R1, it is put back.
    """
    if whole.startswith(asked):
        return whole[len(asked) :]
    question, answer = (message["content"].strip() for message in messages[-2:])
    after = asked.rpartition(question)[2]
    _, is_there, rest = whole.rpartition(question + after)
    if is_there and question:
        return rest
    thought, _, visible = answer.rpartition(THOUGHT)
    thought = messages[-1].get("reasoning_content") or thought.replace(THINK, "")
    _, is_there, end = whole.rpartition(visible.strip())
    if not (asked.rstrip().endswith(THINK) and thought.strip() and visible.strip() and is_there):
        return None
    return f"{thought.strip()}\n{THOUGHT}\n\n{visible.strip()}{end}"


def message_of(tokenizer: PreTrainedTokenizerBase, answer_ids: Sequence[int]) -> Message:
    """Return an answer as the message that a chat goes on with, as servers return it; thinking that was cut off is left out."""
    ids = list(answer_ids)
    channels = dict(CHANNEL.findall(str(tokenizer.decode(ids))))
    if not channels:
        content = str(tokenizer.decode(ids, skip_special_tokens=True))
        opened = content.rfind(THINK)
        return {"role": "assistant", "content": content[:opened] if opened > content.rfind(THOUGHT) else content}
    message = {"role": "assistant", "content": channels.get(FINAL, "")}
    return message | ({"reasoning_content": channels[ANALYSIS]} if ANALYSIS in channels else {})


def ends_in_thinking(target: Target, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> bool:
    """Return whether an answer was cut off before it said anything: no chat goes on from there."""
    text = str(target.tokenizer.decode([*prompt_ids[-8:], *answer_ids]))  # a prompt may open the thinking
    channels = [name for name, _ in CHANNEL.findall(text)]
    return text.rfind(THINK) > text.rfind(THOUGHT) or (bool(channels) and FINAL not in channels)


def check_answer_end(target: Target) -> None:
    """Warn where what the template writes after an answer is no end for the target, which would write on."""
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": SENTINEL}]
    try:
        end = target.chat_text(chat, answer_follows=False).rpartition(SENTINEL)[2].strip()
    except InputError:  # a template that has no such chat is judged by those it is given
        return
    if set(target.eos_token_ids).isdisjoint(target.encode(end)[:1]):
        written = f"after an answer the chat template writes {end[:40]!r}, which does not end one for target"
        logger.warning("%s %s: answers may run on; check eos_token_id in generation_config.json", written, target.identity.name)

"""What a self-seeded prompt is led to, and how a chat template frames it.

The idea is Magpie's (2406.08464): the target continues its own chat template where a user would begin to write. Where
`prompts.kinds` names kinds of task, each prompt is led to one by words that its turn begins with, or by a text that it is
about. What prompt number n is led to (`Plan`) is drawn from (seed, n), out of `seeds.yaml`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.loading import parse_yaml
from configs.schema.data import SELF_SEEDED, PromptsConfig
from heads.frozen.loading import Target
from heads.frozen.tokenizer import in_template

SEEDS = Path(__file__).with_name("seeds.yaml")
SENTINEL = "SELF-SEEDED-TURN-GOES-HERE"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a prompt is led to."""

    kind: str  # its category
    opening: str = ""  # what the user's turn begins with, or the instruction about a text
    text_request: str | None = None  # asks the target for the text; None for kinds without one
    text_limit: int = 0  # its longest length in tokens
    text_first: bool = False  # the text stands before the instruction
    goes_on: bool = True  # the target continues the turn

    def around(self, text: str) -> str:
        """Return the turn, or its beginning, about a text."""
        if self.goes_on:
            return f"{self.opening}\n\n{text}\n\nQuestion:"
        return f"{text}\n\n{self.opening}" if self.text_first else f"{self.opening}\n\n{text}"


def plan_prompt(config: PromptsConfig, seed: int, number: int) -> Plan:
    """Draw what a prompt is led to."""
    if config.kinds is None:
        return Plan(kind=config.category or SELF_SEEDED)
    draws, seeds = random.Random(f"{seed}/{number}"), _seeds()
    kinds = sorted(config.kinds)
    kind = draws.choices(kinds, [config.kinds[each] for each in kinds])[0]
    if kind not in seeds["instructions"]:
        return Plan(kind=kind, opening="" if kind == "free" else _filled(draws, seeds["openings"][kind]))
    return Plan(
        kind=kind,
        opening=_filled(draws, seeds["instructions"][kind]),
        text_request=_filled(draws, seeds["texts"]),
        text_limit=max(1, int(draws.uniform(0.2, 1.0) * config.max_text_tokens)),
        text_first=draws.random() < 0.5,
        goes_on=kind == "answer_from",
    )


@dataclass(frozen=True, kw_only=True)
class UserFrame:
    """What the chat template puts around a user's text."""

    prefix_ids: tuple[int, ...]
    end_ids: frozenset[int]  # the token that ends the turn; empty where the template ends it with plain text
    end_text: str


def find_user_frame(target: Target, max_prompt_tokens: int) -> UserFrame:
    """Take the chat template apart at a user's text."""
    name, tokenizer = target.identity.name, target.tokenizer
    takes_parts = target.model.config.get_text_config() is not target.model.config
    messages = [{"role": "user", "content": SENTINEL}]
    rendered = in_template(tokenizer, name, messages, answer_follows=False, in_parts=takes_parts)
    prefix, found, suffix = rendered.partition(SENTINEL)
    # A trailing space would become a token of its own, which ordinary text does not continue.
    prefix, end_text = prefix.rstrip(" "), suffix.strip()
    if not found or SENTINEL in suffix or not prefix or not end_text:
        raise InputError(
            f"the chat template of target {name} does not frame a user's text so that the target could write one: "
            "give prompts.source file or dataset"
        )
    prefix_ids = tuple(tokenizer(prefix, add_special_tokens=False)["input_ids"])
    suffix_ids = tokenizer(end_text, add_special_tokens=False)["input_ids"]
    if len(prefix_ids) + max_prompt_tokens > target.max_positions:
        raise InputError(
            f"prompts.max_prompt_tokens: {max_prompt_tokens} tokens after the chat template's {len(prefix_ids)} do not fit the "
            f"target's context of {target.max_positions}"
        )
    end_ids = frozenset(suffix_ids[:1]) & {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return UserFrame(prefix_ids=prefix_ids, end_ids=end_ids, end_text=end_text)


def read_turn(target: Target, frame: UserFrame, ids: Sequence[int]) -> str | None:
    """Return the text of a turn, None where it is unusable: it did not end, holds special tokens, or fills the context."""
    content = list(ids[:-1] if frame.end_ids else ids)
    text = str(target.tokenizer.decode(content))
    proper = ids[-1] in frame.end_ids
    if not frame.end_ids:
        text, end, _ = text.partition(frame.end_text)
        proper = bool(end)
    # `all_special_ids` has only the tokens that the tokenizer's config names.
    added = {token for token, added in target.tokenizer.added_tokens_decoder.items() if added.special}
    if not proper or set(content) & {*target.tokenizer.all_special_ids, *added}:
        return None
    text = text.strip()
    return text if len(target.encode_chat([{"role": "user", "content": text}])) < target.max_positions else None


def _filled(draws: random.Random, templates: Sequence[str]) -> str:
    slots = _seeds()["slots"]

    def word(found: re.Match[str]) -> str:
        return str(draws.randint(2, 97)) if found[1] == "number" else str(draws.choice(slots[found[1]]))

    return re.sub(r"\{(\w+)\}", word, draws.choice(templates))


@cache
def _seeds() -> Any:
    return parse_yaml(SEEDS.read_text(encoding="utf-8"), str(SEEDS))

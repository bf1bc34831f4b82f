"""Self-seeded prompts: the target continues its own chat template where a user would begin to write.

The idea is Magpie's (2406.08464). Where `prompts.kinds` names kinds of task, each prompt is led to one by words that its user's
turn begins with. What prompt number n is led to (`Plan`) is drawn from (seed, n), out of `seeds.yaml`. The target then writes,
with random numbers named by (seed, n):

    1. for kinds with a text to work on, that text, as its answer to a request such as "Write a travel guide about tides."
    2. the rest of the user's turn; nothing where instruction and text are all of it
    3. for a dialogue, its own answer and the user's next turn, once or twice
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.loading import parse_yaml
from configs.runtime.terminal import Tokens
from configs.schema.data import SELF_SEEDED, PromptsConfig
from configs.schema.decoding import SamplingConfig
from distill.dataset.conversations import Message
from distill.generation.continuation import Ask, TokenRow, continue_texts
from heads.frozen.loading import Target
from heads.frozen.tokenizer import in_template
from heads.sampling.counter_rng import request_number

SEEDS = Path(__file__).with_name("seeds.yaml")
REGISTER_SHARE = 0.3
MIN_TEXT = 80  # characters
ANSWER_TOKENS = 96  # of the answers that a dialogue's next turn follows
TEMPLATE_ROOM = 32  # tokens of the context left for the template around a further turn
SENTINEL = "SELF-SEEDED-TURN-GOES-HERE"
LONGEST_AROUND = 256  # tokens of a longest prompt's instructions and template, about

Turn = tuple[int, list[str] | None]  # a prompt's number and its turns; None where it is unusable


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a prompt is led to."""

    kind: str  # its category
    opening: str = ""  # what the user's turn begins with, or the instruction about a text
    text_request: str | None = None  # asks the target for the text; None for kinds without one
    text_limit: int = 0  # its longest length in tokens
    text_first: bool = False  # the text stands before the instruction
    goes_on: bool = True  # the target continues the turn
    follow_ups: tuple[str, ...] = ()  # what each further turn begins with


def plan_prompt(config: PromptsConfig, seed: int, name: str, number: int) -> Plan:
    """Draw what a prompt of the source `name` is led to."""
    if config.kinds is None:
        return Plan(kind=config.category or SELF_SEEDED)
    weights = config.kinds
    draws, seeds = random.Random(f"{seed}/{name}/{number}"), _seeds()
    kinds = sorted(weights)
    kind = draws.choices(kinds, [weights[each] for each in kinds])[0]
    if kind in seeds["instructions"]:
        return Plan(
            kind=kind,
            opening=_filled(draws, seeds["instructions"][kind]),
            text_request=_filled(draws, seeds["texts"]),
            text_limit=max(1, int(draws.uniform(0.2, 1.0) * config.max_text_tokens)),
            text_first=draws.random() < 0.5,
            goes_on=kind == "answer_from",
        )
    begins = draws.choice(seeds["dialogues_begin_with"]) if kind == "dialogue" else kind
    opening = "" if begins == "free" else _filled(draws, seeds["openings"][begins])
    if begins in seeds["registers_for"] and draws.random() < REGISTER_SHARE:
        opening = draws.choice(seeds["registers"]) + opening
    num_further = draws.choice((1, 1, 2)) if kind == "dialogue" else 0
    return Plan(kind=kind, opening=opening, follow_ups=tuple(draws.choice(seeds["follow_ups"]) for _ in range(num_further)))


Words = Generator[Ask, list[int], str | None]


class Writer:
    """Lets the target write prompts by number; `name` is the source's, where there are several."""

    def __init__(
        self, target: Target, config: PromptsConfig, tokens: Tokens, *, batch_size: int, seed: int, name: str = ""
    ) -> None:
        self.target, self.config, self.tokens = target, config, tokens
        self.batch_size, self.seed, self.name = batch_size, seed, name
        self.frame = find_user_frame(target, config.max_prompt_tokens)
        self._left: dict[int, int] = {}  # by prompt, the most tokens that its texts may still have

    def write(self, numbers: Sequence[int]) -> list[Turn]:
        """Return each prompt's turns, None where it is unusable."""
        plans = {number: plan_prompt(self.config, self.seed, self.name, number) for number in numbers}
        turn = self.config.max_prompt_tokens
        for number, plan in plans.items():
            self._left[number] = plan.text_limit + plan.goes_on * turn + len(plan.follow_ups) * (ANSWER_TOKENS + turn)
        self.tokens.expect(sum(self._left.values()))
        written = continue_texts(
            self.target,
            SamplingConfig(temperature=self.config.temperature, top_p=self.config.top_p),
            (self._prompt(number, plan) for number, plan in plans.items()),
            seed=self.seed,
            batch_size=self.batch_size,
            capacity=min(self.target.max_positions, max(self._left.values(), default=0) + LONGEST_AROUND),
            tokens=self.tokens,
        )
        return sorted(written)

    def _prompt(self, number: int, plan: Plan) -> Generator[Ask, list[int], Turn]:
        turns = yield from self._turns(number, plan)
        self.tokens.end(self._left.pop(number), 0)
        return number, turns if turns and len(turns) > bool(plan.follow_ups) else None

    def _turns(self, number: int, plan: Plan) -> Generator[Ask, list[int], list[str] | None]:
        """Ask for a prompt's texts; return its turns, None where the first is unusable."""
        opening: str | None = plan.opening
        if plan.text_request is not None:
            text = yield from self._text(number, plan.text_request, plan.text_limit)
            opening = None if text is None else _around(plan, text)
        if opening is None:
            return None
        first: str | None = opening
        if plan.goes_on:
            first = yield from self._turn(number, self.frame, opening, "turn-0")
            if first is not None and plan.text_request is not None:
                first = _first_line(opening, first)
        if first is None or len(self.target.encode_chat([_said(first)])) >= self.target.max_positions:
            return None
        turns, history = [first], list[Message]()
        room = self.target.max_positions - self.config.max_prompt_tokens - TEMPLATE_ROOM
        for further, follow_up in enumerate(plan.follow_ups):
            history.append(_said(turns[-1]))
            asked = self.target.encode_chat(history)
            ids = yield from self._written(number, asked, ANSWER_TOKENS, f"answer-{further}")
            if ids is None or len(asked) + len(ids) >= room:
                break
            history.append({"role": "assistant", "content": self._plain(ids)})
            frame = find_user_frame(self.target, self.config.max_prompt_tokens, history)
            if (turn := (yield from self._turn(number, frame, follow_up, f"turn-{further + 1}"))) is None:
                break
            turns.append(turn)
        return turns

    def _text(self, number: int, request: str, limit: int) -> Words:
        """Ask for the text that a prompt works on, up to its last whole sentence."""
        ids = yield from self._written(number, self.target.encode_chat([_said(request)]), limit, "text")
        text = self._plain(ids or [])
        if ids and ids[-1] not in self.target.eos_token_ids:
            text = text[: 1 + max(text.rfind(mark) for mark in ".!?\n。")]
        return text.strip() if len(text.strip()) >= MIN_TEXT else None

    def _turn(self, number: int, frame: UserFrame, opening: str, stage: str) -> Words:
        """Ask for the user's turn that begins with these words, which the target ends after some of its own."""
        begun = self.target.tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []

        def has_ended(row: TokenRow) -> bool:
            if row.tokens[-1] in self.frame.end_ids or row.tokens[-1] in self.target.eos_token_ids:
                return True
            return not self.frame.end_ids and self.frame.end_text in self.target.tokenizer.decode(row.written)

        limit = self.config.max_prompt_tokens
        ids = yield from self._written(number, [*frame.prefix_ids, *begun], limit, stage, has_ended)
        text = None if ids is None else read_turn(self.target, self.frame, [*begun, *ids])
        return text if text is not None and len(text) > len(opening.strip()) else None

    def _written(
        self, number: int, ids: list[int], limit: int, stage: str, has_ended: Callable[[TokenRow], bool] | None = None
    ) -> Generator[Ask, list[int], list[int] | None]:
        """Ask for a continuation of tokens; return it, None where they fill the context."""
        if len(ids) >= self.target.max_positions:
            return None
        self._left[number] -= limit
        name = f"{number}/{stage}" if self.config.kinds is not None else f"self-{number}"
        prefix = "" if self.config.kinds is None and not self.name else f"{self.name}/"
        return (yield Ask(ids, limit, request_number(prefix + name), has_ended=has_ended))

    def _plain(self, ids: Sequence[int]) -> str:
        return str(self.target.tokenizer.decode(list(ids), skip_special_tokens=True))


@dataclass(frozen=True, kw_only=True)
class UserFrame:
    """What the chat template puts around a user's text."""

    prefix_ids: tuple[int, ...]
    end_ids: frozenset[int]  # the token that ends the turn; empty where the template ends it with plain text
    end_text: str


def find_user_frame(target: Target, max_prompt_tokens: int, before: Sequence[Message] = ()) -> UserFrame:
    """Take the chat template apart at a user's text, which follows the messages `before`."""
    name, tokenizer = target.identity.name, target.tokenizer
    takes_parts = target.model.config.get_text_config() is not target.model.config
    messages = [*before, {"role": "user", "content": SENTINEL}]
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


def _around(plan: Plan, text: str) -> str:
    if plan.goes_on:
        return f"{plan.opening}\n\n{text}\n\nQuestion:"
    return f"{text}\n\n{plan.opening}" if plan.text_first else f"{plan.opening}\n\n{text}"


def _first_line(opening: str, text: str) -> str:
    """Return a turn up to the first line after its opening: a question, without the answer that a target may add to it."""
    added, _, _ = text.removeprefix(opening).strip().partition("\n")
    return f"{opening} {added}" if text.startswith(opening) else text


def _said(text: str) -> Message:
    return {"role": "user", "content": text}


def _filled(draws: random.Random, templates: Sequence[str]) -> str:
    slots = _seeds()["slots"]

    def word(found: re.Match[str]) -> str:
        return str(draws.randint(2, 97)) if found[1] == "number" else str(draws.choice(slots[found[1]]))

    return re.sub(r"\{(\w+)\}", word, draws.choice(templates))


@cache
def _seeds() -> Any:
    return parse_yaml(SEEDS.read_text(encoding="utf-8"), str(SEEDS))

"""Self-seeded prompts: the target continues its own chat template where a user would begin to write.

An instruction-tuned model has seen many user turns and writes plausible ones (the idea of Magpie, 2406.08464). Where
`prompts.kinds` names kinds of task, each prompt is led to one by words that its user's turn begins with. What prompt number n
is led to (`Plan`) is drawn from (seed, n), out of `seeds.yaml`. The target then writes, with random numbers named by (seed, n):

    1. for kinds with a text to work on, that text, as its answer to a request such as "Write a travel guide about tides."
    2. the rest of the user's turn; nothing where instruction and text are all of it
    3. for a dialogue, its own answer and the user's next turn, once or twice

A target's texts and questions are often poor. What counts is that they are many and varied: a draft learns from the answers.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from configs.runtime.loading import parse_yaml
from configs.runtime.terminal import Tokens
from configs.schema.data import SELF_SEEDED, PromptsConfig
from configs.schema.decoding import SamplingConfig
from distill.dataset.conversations import Message
from distill.generation.continuation import RowQueue, TargetSource, TokenRow, continue_rows, request_number
from distill.generation.user_frame import UserFrame, find_user_frame, read_turn, turn_ended
from heads.frozen.loading import Target

SEEDS = Path(__file__).with_name("seeds.yaml")
REGISTER_SHARE = 0.3
MIN_TEXT = 80  # characters
ANSWER_TOKENS = 96  # of the answers that a dialogue's next turn follows
TEMPLATE_ROOM = 32  # tokens of the context left for the template around a further turn
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


class _Ask(NamedTuple):
    """Tokens that a prompt waits for: the continuation of these."""

    ids: Sequence[int]
    limit: int
    stage: str  # names the random numbers
    is_turn: bool = False  # of the user's; else a text, or an answer


Words = Generator[_Ask, list[int], str | None]


class Writer:
    """Lets the target write prompts by number; `name` is the source's, where there are several."""

    def __init__(
        self, target: Target, config: PromptsConfig, tokens: Tokens, *, batch_size: int, seed: int, name: str = ""
    ) -> None:
        self.target, self.config, self.tokens = target, config, tokens
        self.batch_size, self.seed, self.name = batch_size, seed, name
        self.frame = find_user_frame(target, config.max_prompt_tokens)

    def write(self, numbers: Sequence[int]) -> list[Turn]:
        """Return each prompt's turns, None where it is unusable. As one gets its tokens, another takes its place."""
        plans = {number: plan_prompt(self.config, self.seed, self.name, number) for number in numbers}
        turn = self.config.max_prompt_tokens
        left = {  # the most tokens that a prompt's texts may still have
            number: plan.text_limit + plan.goes_on * turn + len(plan.follow_ups) * (ANSWER_TOKENS + turn)
            for number, plan in plans.items()
        }
        self.tokens.expect(sum(left.values()))
        capacity = min(self.target.max_positions, max(left.values(), default=0) + LONGEST_AROUND)
        waiting = deque[tuple[int, Any, Any]]((number, self._turns(plan), None) for number, plan in plans.items())
        asked: dict[int, tuple[Any, _Ask]] = {}
        turns: dict[int, list[str] | None] = {}

        def next_row() -> TokenRow | None:
            while waiting:
                number, prompt, ids = waiting.popleft()
                try:
                    ask = prompt.send(ids)
                except StopIteration as over:
                    turns[number] = over.value
                    self.tokens.end(left[number], 0)
                    continue
                asked[number] = prompt, ask
                stage = f"{self.name}/{number}/{ask.stage}"
                name = stage if self.config.kinds is not None else f"{self.name}/self-{number}".lstrip("/")
                limit = min(self.target.max_positions, len(ask.ids) + ask.limit)
                return TokenRow(key=number, prompt_ids=ask.ids, limit=limit, request=request_number(name))
            return None

        def has_ended(row: TokenRow) -> bool:
            _, ask = asked[row.key]
            return turn_ended(self.target, self.frame, row) if ask.is_turn else row.tokens[-1] in self.target.eos_token_ids

        sampling = SamplingConfig(temperature=self.config.temperature, top_p=self.config.top_p)
        for row in continue_rows(
            TargetSource(self.target, sampling, capacity=capacity),
            RowQueue(next_row),
            seed=self.seed,
            has_ended=has_ended,
            batch_size=self.batch_size,
            on_step=self.tokens.write,
        ):
            prompt, ask = asked[row.key]
            left[row.key] -= ask.limit
            self.tokens.end(ask.limit, len(row.written))
            waiting.appendleft((row.key, prompt, row.written))
        return [(number, turns[number]) for number in numbers]

    def _turns(self, plan: Plan) -> Generator[_Ask, list[int], list[str] | None]:
        """Ask for a prompt's tokens, and return its turns, None where it is unusable."""
        first: str | None = plan.opening
        if plan.text_request is not None:
            if (text := (yield from self._text(plan.text_request, plan.text_limit))) is None:
                return None
            first = _around(plan, text)
        if plan.goes_on:
            opening = str(first)
            first = yield from self._turn(self.frame, opening, "turn-0")
            if first is not None and plan.text_request is not None:
                first = _first_line(opening, first)
        elif len(self.target.encode_chat([_said(str(first))])) >= self.target.max_positions:
            return None
        if first is None:
            return None
        turns, history = [first], list[Message]()
        for number, follow_up in enumerate(plan.follow_ups):
            history.append(_said(turns[-1]))
            asked = self.target.encode_chat(history)
            if len(asked) >= self.target.max_positions:
                break
            ids = yield _Ask(asked, ANSWER_TOKENS, f"answer-{number}")
            history.append({"role": "assistant", "content": self._plain(ids)})
            if len(asked) + len(ids) >= self.target.max_positions - self.config.max_prompt_tokens - TEMPLATE_ROOM:
                break
            frame = find_user_frame(self.target, self.config.max_prompt_tokens, history)
            if (turn := (yield from self._turn(frame, follow_up, f"turn-{number + 1}"))) is None:
                break
            turns.append(turn)
        return turns if len(turns) > bool(plan.follow_ups) else None

    def _text(self, request: str, limit: int) -> Words:
        """Ask for the text that a prompt works on, up to its last whole sentence."""
        asked = self.target.encode_chat([_said(request)])
        if len(asked) >= self.target.max_positions:
            return None
        ids = yield _Ask(asked, limit, "text")
        text = self._plain(ids)
        if ids[-1] not in self.target.eos_token_ids:
            text = text[: 1 + max(text.rfind(mark) for mark in ".!?\n。")]
        return text.strip() if len(text.strip()) >= MIN_TEXT else None

    def _turn(self, frame: UserFrame, opening: str, stage: str) -> Words:
        """Ask for the user's turn that begins with these words, which the target ends after some of its own."""
        begun = self.target.tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []
        prefix = [*frame.prefix_ids, *begun]
        if len(prefix) >= self.target.max_positions:
            return None
        ids = yield _Ask(prefix, self.config.max_prompt_tokens, stage, is_turn=True)
        text = read_turn(self.target, self.frame, [*begun, *ids])
        return text if text is not None and len(text) > len(opening.strip()) else None

    def _plain(self, ids: Sequence[int]) -> str:
        return str(self.target.tokenizer.decode(list(ids), skip_special_tokens=True))


def _around(plan: Plan, text: str) -> str:
    """Return a turn about a text, or its beginning."""
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
    """Draw a template and words for its slots."""
    slots = _seeds()["slots"]

    def word(found: re.Match[str]) -> str:
        return str(draws.randint(2, 97)) if found[1] == "number" else str(draws.choice(slots[found[1]]))

    return re.sub(r"\{(\w+)\}", word, draws.choice(templates))


@cache
def _seeds() -> Any:
    return parse_yaml(SEEDS.read_text(encoding="utf-8"), str(SEEDS))

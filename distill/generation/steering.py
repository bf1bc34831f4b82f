"""Self-seeded prompts: the target continues its own chat template where a user would begin to write.

An instruction-tuned model has seen many user turns and writes plausible ones (the idea of Magpie, 2406.08464). Where
`prompts.kinds` names kinds of task, each prompt is led to one by words that its user's turn begins with. What prompt number n
is led to (`Plan`) is drawn from (seed, n), out of `seeds.yaml`. The target then writes, each step for all prompts together and
with random numbers named by the prompt's number:

    1. for kinds with a text to work on, that text, as its answer to a request such as "Write a travel guide about tides."
    2. the rest of the user's turn; nothing where instruction and text are all of it
    3. for a dialogue, its own answer and the user's next turn, once or twice

A target's texts and questions are often poor. What counts is that they are many and varied: a draft learns from the answers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from configs.runtime.loading import parse_yaml
from configs.runtime.terminal import Tokens
from configs.schema.data import SELF_SEEDED, PromptsConfig
from configs.schema.decoding import SamplingConfig
from distill.dataset.conversations import Message
from distill.generation.continuation import TargetSource, TokenRow, continue_rows, request_number
from distill.generation.user_frame import UserFrame, find_user_frame, read_turn, turn_ended
from heads.frozen.loading import Target

SEEDS = Path(__file__).with_name("seeds.yaml")
REGISTER_SHARE = 0.3
MIN_TEXT = 80  # characters
ANSWER_TOKENS = 96  # of the answers that a dialogue's next turn follows
TEMPLATE_ROOM = 32  # tokens of the context left for the template around a further turn

Turn = tuple[int, list[str] | None]  # a prompt's number and its turns; None where it is unusable


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a prompt is led to."""

    kind: str  # its category
    opening: str = ""  # what the user's turn begins with, or the instruction about a text
    text_request: str | None = None  # asks the target for the text; None for kinds without one
    text_share: float = 1.0  # of the longest text allowed
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
            text_share=draws.uniform(0.2, 1.0),
            text_first=draws.random() < 0.5,
            goes_on=kind == "answer_from",
        )
    begins = draws.choice(seeds["dialogues_begin_with"]) if kind == "dialogue" else kind
    opening = "" if begins == "free" else _filled(draws, seeds["openings"][begins])
    if begins in seeds["registers_for"] and draws.random() < REGISTER_SHARE:
        opening = draws.choice(seeds["registers"]) + opening
    num_further = draws.choice((1, 1, 2)) if kind == "dialogue" else 0
    return Plan(kind=kind, opening=opening, follow_ups=tuple(draws.choice(seeds["follow_ups"]) for _ in range(num_further)))


class Writer:
    """Lets the target write prompts by number; `name` is the source's, where there are several."""

    def __init__(
        self, target: Target, config: PromptsConfig, tokens: Tokens, *, batch_size: int, seed: int, name: str = ""
    ) -> None:
        self.target, self.config, self.tokens = target, config, tokens
        self.batch_size, self.seed, self.name = batch_size, seed, name
        self.frame = find_user_frame(target, config.max_prompt_tokens)
        self._open: dict[int, int] = {}  # by prompt, the most tokens that are still expected of it

    def write(self, numbers: Sequence[int]) -> list[Turn]:
        """Return each prompt's turns, None where it is unusable."""
        plans = {number: plan_prompt(self.config, self.seed, self.name, number) for number in numbers}
        self._open = {number: self._limit(plan) for number, plan in plans.items()}
        self.tokens.expect(sum(self._open.values()))
        openings = {number: plan.opening for number, plan in plans.items() if plan.text_request is None}
        texts = self._texts({number: plan for number, plan in plans.items() if plan.text_request is not None})
        openings |= {number: _around(plans[number], text) for number, text in texts.items()}
        self._give_up(plans.keys() - openings.keys())
        turns = {number: [text] for number, text in openings.items() if not plans[number].goes_on and self._fits(text)}
        goes_on = {number: (self.frame, text) for number, text in openings.items() if plans[number].goes_on}
        for number, text in self._user_turns(goes_on, "turn-0").items():
            about_a_text = plans[number].text_request is not None
            turns[number] = [_first_line(openings[number], text) if about_a_text else text]
        self._give_up(plans.keys() - turns.keys())
        history: dict[int, list[Message]] = {number: [] for number in turns}
        for further in range(max((len(plan.follow_ups) for plan in plans.values()), default=0)):
            self._go_on(turns, history, plans, further)
            self._give_up({number for number, said in turns.items() if len(said) < further + 2})
        whole = {number: said for number, said in turns.items() if len(said) > bool(plans[number].follow_ups)}
        return [(number, whole.get(number)) for number in numbers]

    def _limit(self, plan: Plan) -> int:
        """Return how many tokens a prompt's texts have at most."""
        turn = self.config.max_prompt_tokens
        text = 0 if plan.text_request is None else self._text_limit(plan)
        return text + turn * plan.goes_on + len(plan.follow_ups) * (ANSWER_TOKENS + turn)

    def _give_up(self, numbers: Set[int]) -> None:
        """Expect no more tokens of these prompts."""
        self.tokens.end(sum(self._open.pop(number, 0) for number in numbers), 0)

    def _text_limit(self, plan: Plan) -> int:
        return max(1, int(plan.text_share * self.config.max_text_tokens))

    def _go_on(
        self, turns: dict[int, list[str]], history: dict[int, list[Message]], plans: Mapping[int, Plan], further: int
    ) -> None:
        """Append a further turn to the dialogues that are to have one and have all before it."""
        due = [number for number, said in turns.items() if len(plans[number].follow_ups) > further and len(said) == further + 1]
        for number in due:
            history[number].append(_said(turns[number][-1]))
        asked = {number: self.target.encode_chat(history[number]) for number in due}
        room = self.target.max_positions - self.config.max_prompt_tokens - TEMPLATE_ROOM
        frames: dict[int, tuple[UserFrame, str]] = {}
        for number, ids in self._continue(asked, dict.fromkeys(asked, ANSWER_TOKENS), f"answer-{further}").items():
            history[number].append({"role": "assistant", "content": self._plain(ids)})
            if len(asked[number]) + len(ids) < room:
                frame = find_user_frame(self.target, self.config.max_prompt_tokens, history[number])
                frames[number] = (frame, plans[number].follow_ups[further])
        for number, text in self._user_turns(frames, f"turn-{further + 1}").items():
            turns[number].append(text)

    def _texts(self, plans: Mapping[int, Plan]) -> dict[int, str]:
        """Return the texts that prompts work on, up to their last whole sentence."""
        asked = {number: self.target.encode_chat([_said(plan.text_request or "")]) for number, plan in plans.items()}
        limits = {number: self._text_limit(plan) for number, plan in plans.items()}
        texts = {}
        for number, ids in self._continue(asked, limits, "text").items():
            text = self._plain(ids)
            if ids[-1] not in self.target.eos_token_ids:
                text = text[: 1 + max(text.rfind(mark) for mark in ".!?\n。")]
            if len(text.strip()) >= MIN_TEXT:
                texts[number] = text.strip()
        return texts

    def _user_turns(self, openings: Mapping[int, tuple[UserFrame, str]], stage: str) -> dict[int, str]:
        """Return the user's turns that begin with these words, where the target ended them after some of its own."""
        tokenizer = self.target.tokenizer
        begun = {
            number: tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
            for number, (_, text) in openings.items()
        }
        prefixes = {number: [*frame.prefix_ids, *begun[number]] for number, (frame, _) in openings.items()}
        texts = {}
        for number, ids in self._continue(
            prefixes, dict.fromkeys(prefixes, self.config.max_prompt_tokens), stage, user=True
        ).items():
            text = read_turn(self.target, self.frame, [*begun[number], *ids])
            if text is not None and len(text) > len(openings[number][1].strip()):
                texts[number] = text
        return texts

    def _continue(
        self, prompts: Mapping[int, Sequence[int]], limits: Mapping[int, int], stage: str, *, user: bool = False
    ) -> dict[int, list[int]]:
        """Continue prompts that leave room in the context, those of similar length together, up to the end of a turn."""
        longest, steered = self.target.max_positions, self.config.kinds is not None
        fitting = sorted((number for number, ids in prompts.items() if len(ids) < longest), key=lambda each: len(prompts[each]))
        rows = [
            TokenRow(
                key=number,
                prompt_ids=prompts[number],
                limit=min(longest, len(prompts[number]) + limits[number]),
                request=request_number(
                    f"{self.name}/{number}/{stage}" if steered else f"{self.name}/self-{number}".lstrip("/")
                ),
            )
            for number in fitting
        ]
        sampling = SamplingConfig(temperature=self.config.temperature, top_p=self.config.top_p)
        source = TargetSource(self.target, sampling, capacity=max((row.limit for row in rows), default=0))
        ended = turn_ended(self.target, self.frame) if user else lambda row: row.tokens[-1] in self.target.eos_token_ids
        written: dict[int, list[int]] = {}
        for row in continue_rows(
            source, rows, seed=self.seed, has_ended=ended, batch_size=self.batch_size, on_step=self.tokens.write
        ):
            written[row.key] = row.written
            self._open[row.key] -= limits[row.key]
            self.tokens.end(limits[row.key], len(row.written))
        return written

    def _fits(self, text: str) -> bool:
        return len(self.target.encode_chat([_said(text)])) < self.target.max_positions

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

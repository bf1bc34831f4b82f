"""Prompts to conversations: answers written turn by turn, or taken from the data set.

An `AnswerJob` shares the prompts of a data set between processes. Locally the target continues `batch_size` rows at a time, and
the next turn or prompt takes the place of an answer that has ended. What is answered is kept in journals, from which a job goes
on and its conversations are read one prompt at a time: none are held in memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.runtime.resumable import Journal, Place
from configs.runtime.terminal import Tokens, progress
from configs.schema.data import AnswersConfig
from distill.dataset.conversations import Conversation, Message
from distill.generation.continuation import RowQueue, TargetSource, TokenRow, continue_rows, request_number, up_to_end
from distill.generation.prompts import Prompt, encode_prompt
from heads.frozen.loading import Target

# Why a turn has no answer.
EMPTY = "empty_answer"  # it ended at once
NO_ROOM = "no_room_in_context"  # the conversation so far fills the context of the target, or the shorter one of the server
UNREACHED = "turn_after_a_dropped_one"
HOLDS_A_PLACEHOLDER = "answer_holds_a_placeholder"  # in whose place there is no image or sound in an answer
NOT_A_CONTINUATION = "answer_does_not_continue_its_prompt"  # the chat template writes the prompt differently before an answer

TEMPLATE_TOKENS = 64  # about what a chat template puts around two messages
ANSWER_JOURNALS = ".answers.partial-{rank}.jsonl"


class Answered(NamedTuple):
    """What was answered."""

    rows_of: Callable[[Prompt], Sequence[Conversation]]  # reads a prompt's conversations; to be asked once for each prompt
    dropped: Mapping[str, int]  # turns by reason, complete once all prompts were asked for


@dataclass(kw_only=True)
class Dialogue:
    """A prompt whose turns are being answered, each after the answers to those before."""

    number: int  # of the prompt in its job
    prompt: Prompt
    said: list[Message] = field(init=False)
    rows: list[Conversation] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    encoded: tuple[int, ...] = ()  # up to the turn that is to be answered
    num_written: int = 0  # tokens of its answers

    def __post_init__(self) -> None:
        self.said = list(self.prompt.history)

    @property
    def is_over(self) -> bool:
        return bool(self.dropped) or len(self.rows) == len(self.prompt.turns)

    @property
    def request(self) -> int:
        """The number of the turn's random numbers."""
        return request_number(f"{self.prompt.prompt_id}/{len(self.rows)}")

    @property
    def piece(self) -> dict[str, Any]:
        """What a journal keeps of it."""
        return {"rows": [asdict(row) for row in self.rows], "dropped": dict(self.dropped)}

    def ask(self, target: Target) -> bool:
        """Encode the next turn; return whether there is one that fits the target's context."""
        if self.is_over:
            return False
        self.said = [*self.said, {"role": "user", "content": self.prompt.turns[len(self.rows)]}]
        self.encoded = tuple(target.encode_chat(self.said, tools=self.prompt.tools, media=self.prompt.media))
        if len(self.encoded) >= target.max_positions:
            self._drop(NO_ROOM)
        return not self.is_over

    def settle(self, target: Target, answer: list[int] | str) -> None:
        """Take the turn's answer, or the reason why there is none."""
        if isinstance(answer, str):
            self._drop(answer)
            return
        self.num_written += len(answer)
        text = str(target.tokenizer.decode(answer, skip_special_tokens=True))
        said = (*self.said, {"role": "assistant", "content": text})
        outcome = _conversation(target, self.prompt, len(self.rows), said, self.encoded, answer)
        if isinstance(outcome, str):
            self._drop(outcome)
        else:
            self.said = list(said)
            self.rows.append(outcome)

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1
        if num_left := len(self.prompt.turns) - len(self.rows) - 1:
            self.dropped[UNREACHED] += num_left


@dataclass(frozen=True, kw_only=True)
class AnswerJob:
    """Prompts to be answered by one or several processes, each of which keeps what is finished in `folder`."""

    target: Target
    prompts: Sequence[Prompt]
    config: AnswersConfig
    seed: int
    folder: Path
    fingerprint: str
    lengths: Sequence[int] = ()  # tokens of each prompt; without them its characters are taken

    def work(self, *, rank: int, num_processes: int, writes: bool = True) -> None:
        """Answer this process's share of the prompts, except those that are answered; without `writes` only compute them."""
        needs = [self._room(number) for number in range(len(self.prompts))]
        order = sorted(range(len(needs)), key=lambda number: (-needs[number], number))  # the longest first
        own, finished = order[rank::num_processes], self.finished()
        missing = [number for number in own if not finished[number]]
        journal = Journal(self.folder / ANSWER_JOURNALS.format(rank=rank), self.fingerprint)
        tokens = Tokens()
        tokens.expect(sum(map(self._longest, missing)))
        dialogues = (Dialogue(number=number, prompt=self.prompts[number]) for number in missing)
        capacity = min(self.target.max_positions, needs[missing[0]]) if missing else 0
        over = refilled(self.target, dialogues, self.config, seed=self.seed, capacity=capacity, on_step=tokens.write)
        with progress("answers", len(own), "prompts", done=len(own) - len(missing), tokens=tokens) as advance:
            while group := list(islice(over, self.config.batch_size)):  # a write to the disk waits for it: several at a time
                for dialogue in group:
                    tokens.end(self._longest(dialogue.number), dialogue.num_written)
                advance(len(group))
                if writes:
                    journal.extend({str(dialogue.number): dialogue.piece for dialogue in group})

    def finished(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return which prompts were answered, by any process."""
        found = np.zeros(len(self.prompts), bool)
        for _, key, _, _ in self._pieces():
            found[int(key)] = True
        return found

    def collect(self) -> Answered:
        """Return what all processes wrote; `RuntimeError` where one has not finished."""
        journals: list[Journal] = []
        places = np.full((len(self.prompts), 3), -1)  # of the journal, and in it
        dropped = Counter[str]()
        for journal, key, place, piece in self._pieces():
            if journal not in journals:
                journals.append(journal)
            places[int(key)] = (journals.index(journal), *place)
            dropped.update(piece["dropped"])
        missing = np.flatnonzero(places[:, 0] < 0)
        if len(missing):
            raise RuntimeError(f"answers to {len(missing)} prompts are missing in {self.folder}, the first is {missing[0]}")
        numbers = {prompt.prompt_id: number for number, prompt in enumerate(self.prompts)}

        def rows_of(prompt: Prompt) -> list[Conversation]:
            which, *place = places[numbers[prompt.prompt_id]].tolist()
            return [Conversation.from_dict(row, "a finished piece") for row in journals[which].piece(Place(*place))["rows"]]

        return Answered(rows_of, dropped)

    def _room(self, number: int) -> int:
        """Return about how many positions a prompt's turns take, their answers at their longest."""
        prompt = self.prompts[number]
        length = self.lengths[number] if self.lengths else len(prompt.user_text)
        return length + self._longest(number) + sum(len(turn) + TEMPLATE_TOKENS for turn in prompt.turns[1:])

    def _longest(self, number: int) -> int:
        """Return how many tokens the answers to a prompt's turns may have together."""
        prompt = self.prompts[number]
        return len(prompt.turns) * (prompt.max_new_tokens or self.config.max_new_tokens)

    def _pieces(self) -> Iterator[tuple[Journal, str, Place, Any]]:
        for path in sorted(self.folder.glob(ANSWER_JOURNALS.format(rank="*"))):
            journal = Journal(path, self.fingerprint)
            for found in journal.scan():
                yield journal, *found


def refilled(
    target: Target,
    dialogues: Iterator[Dialogue],
    config: AnswersConfig,
    *,
    seed: int,
    capacity: int = 0,
    on_step: Callable[[int], None] = lambda count: None,
) -> Iterator[Dialogue]:
    """Let the target answer dialogues, `config.batch_size` rows at a time, and yield each as it is over."""
    under_way: dict[int, Dialogue] = {}  # by number
    answered, over = deque[Dialogue](), deque[Dialogue]()  # the first with a turn to come

    def next_row() -> TokenRow | None:
        while (dialogue := answered.popleft() if answered else next(dialogues, None)) is not None:
            if dialogue.ask(target):
                under_way[dialogue.number], prompt = dialogue, dialogue.prompt
                limit = len(dialogue.encoded) + (prompt.max_new_tokens or config.max_new_tokens)
                return TokenRow(
                    key=dialogue.number,
                    prompt_ids=dialogue.encoded,
                    limit=min(limit, target.max_positions),
                    request=dialogue.request,
                    media_prompt=target.media_prompt(dialogue.said, prompt.media, tools=prompt.tools),
                )
            over.append(dialogue)
        return None

    for row in continue_rows(
        TargetSource(target, config, capacity=capacity),
        RowQueue(next_row),
        seed=seed,
        has_ended=lambda row: row.tokens[-1] in target.eos_token_ids,
        batch_size=config.batch_size,
        on_step=on_step,
    ):
        dialogue = under_way.pop(row.key)
        dialogue.settle(target, row.written)
        (over if dialogue.is_over else answered).append(dialogue)
        while over:
            yield over.popleft()
    yield from over


def existing_answers(target: Target, max_new_tokens: int) -> Answered:
    """Encode prompts with the answers that they bring (`check_given`), longer ones cut off at `max_new_tokens`."""
    dropped = Counter[str]()

    def rows_of(prompt: Prompt) -> list[Conversation]:
        prompt_ids = encode_prompt(target, prompt)
        messages = (*prompt.messages, {"role": "assistant", "content": str(prompt.answer)})
        whole = target.encode_chat(messages, tools=prompt.tools, answer_follows=False, media=prompt.media)
        outcome: Conversation | str = NOT_A_CONTINUATION
        if tuple(whole[: len(prompt_ids)]) == prompt_ids:
            longest = min(prompt.max_new_tokens or max_new_tokens, target.max_positions - len(prompt_ids))
            answer_ids = up_to_end(whole[len(prompt_ids) :], target.eos_token_ids)[:longest]
            outcome = _conversation(target, prompt, 0, messages, prompt_ids, answer_ids)
        if isinstance(outcome, str):
            dropped[outcome] += 1
            return []
        return [outcome]

    return Answered(rows_of, dropped)


def _conversation(
    target: Target,
    prompt: Prompt,
    turn: int,
    messages: tuple[Message, ...],
    prompt_ids: tuple[int, ...],
    answer_ids: Sequence[int],
) -> Conversation | str:
    """Return an answered turn, or the reason why it is dropped."""
    ended = bool(answer_ids) and answer_ids[-1] in target.eos_token_ids
    if len(answer_ids) == ended:
        return EMPTY
    if target.runner.placeholder in answer_ids:
        return HOLDS_A_PLACEHOLDER
    return Conversation(
        prompt_id=prompt.prompt_id,
        category=prompt.category,
        turn=turn,
        messages=messages,
        tools=prompt.tools,
        prompt_ids=prompt_ids,
        answer_ids=tuple(answer_ids),
        ended=ended,
        media_prompt=target.media_prompt(messages[:-1], prompt.media, tools=prompt.tools),
    )

"""Prompts to conversations: answers written turn by turn, or taken from the data set.

An `AnswerJob` shares the prompts of a data set between processes. Locally the target continues `batch_size` rows at a time, and
the next turn or prompt takes the place of an answer that has ended. What is answered is kept in journals, from which a job goes
on and its conversations are read one prompt at a time: none are held in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from configs.runtime.errors import InputError
from configs.runtime.run_record import Journal, Place
from configs.runtime.terminal import progress
from configs.schema.data import AnswersConfig
from distill.dataset.conversations import Conversation, Message
from distill.generation.bad_rows import BadRow, LeftOut
from distill.generation.continuation import Request, TargetSource, continue_requests, up_to_end
from distill.generation.prompts import NOT_ENCODED, Prompt, answer_of, encode_prompt, said_since, spelled, turns_of
from distill.generation.rendering import Omissions, answer_text, ends_in_thinking, message_of
from heads.frozen.loading import Target
from heads.sampling.draws import request_number

# Why a turn has no answer.
EMPTY = "empty_answer"  # it ended at once
NO_ROOM = "no_room_in_context"  # the conversation so far fills the context of the target, or the shorter one of the server
UNREACHED = "turn_after_a_dropped_one"
HOLDS_A_PLACEHOLDER = "answer_holds_a_placeholder"  # in whose place there is no image or sound in an answer
NOT_A_CONTINUATION = "answer_does_not_continue_its_prompt"  # the chat template writes it otherwise after the prompt

TEMPLATE_TOKENS = 64  # about what a chat template puts around two messages
ANSWER_JOURNALS = ".answers.partial-{rank}.jsonl"


class Answered(NamedTuple):
    """What was answered."""

    rows_of: Callable[[Prompt], Sequence[Conversation]]  # reads a prompt's conversations; to be asked once for each prompt
    dropped: Mapping[str, int]  # turns by reason, complete once all prompts were asked for
    warn: Callable[[], None] = lambda: None  # says, after that, what an odd template left out


class Dialogue:
    """A chat under way: `ask` for a turn, `take` its answer, and so on until nothing is asked.

    The chat goes on from the answer that was taken. It goes on from the source's own where there is none or only the beginning
    of one, and where a tool's result follows, which is the result of what the source's answer called.
    """

    def __init__(self, target: Target, prompt: Prompt, max_new_tokens: int) -> None:
        self.target, self.turns = target, turns_of(prompt)
        self.max_new_tokens = max_new_tokens
        self.rows: list[dict[str, Any]] = []
        self.dropped = Counter[str]()
        self._said: list[Message] = []
        self._turn = 0
        self._asked: tuple[int, ...] = ()

    @property
    def piece(self) -> dict[str, Any]:
        """What a journal keeps: rows and dropped turns."""
        return {"rows": self.rows, "dropped": dict(+self.dropped)}

    def ask(self) -> Request | None:
        """Return the request for the next turn's answer; None where there is none."""
        if self._turn == len(self.turns):
            return None
        prompt = self.turns[self._turn]
        self._said += said_since(self.turns, self._turn)
        tools, media, longest = prompt.tools, prompt.media, self.target.max_positions
        self._asked = tuple(prompt.encode(self.target, prompt.text_of(self.target, self._said)))
        if len(self._asked) >= longest:
            self._go_on(NO_ROOM, None)
            return None
        return Request(
            prompt_ids=self._asked,
            limit=min(longest, len(self._asked) + self.max_new_tokens),
            number=request_number(f"{prompt.prompt_id}/{self._turn}"),
            has_ended=lambda request: request.tokens[-1] in self.target.eos_token_ids,
            media_prompt=self.target.media_prompt(self._said, media, tools=tools),
        )

    def take(self, answer: Sequence[int] | str) -> None:
        """Note the answer to what was asked, or why there is none."""
        given = answer_of(self.turns[self._turn])
        if isinstance(answer, str):
            self._go_on(answer, given)
            return
        prompt = self.turns[self._turn]
        own = {"role": "assistant", "content": spelled(answer)} if prompt.of_ids else message_of(self.target.tokenizer, answer)
        outcome = _conversation(self.target, prompt, self._turn, (*self._said, own), self._asked, answer)
        if isinstance(outcome, str):
            self._go_on(outcome, given)
            return
        self.rows.append(asdict(outcome))
        following = said_since(self.turns, self._turn + 1)[:1] if self._turn + 1 < len(self.turns) else []
        is_of_source = given is not None and (not outcome.ended or any(each["role"] != "user" for each in following))
        is_open = not outcome.ended and ends_in_thinking(self.target, self._asked, answer)
        self._go_on(None, given if is_of_source else None if is_open else own)

    def _go_on(self, dropped: str | None, answer: Message | None) -> None:
        """Go on to the next turn after an answer; where there is none, the turns that are left are lost."""
        self._turn += 1
        if dropped is not None:
            self.dropped[dropped] += 1
        if answer is not None:
            self._said.append(answer)
            return
        self.dropped[UNREACHED] += len(self.turns) - self._turn
        self._turn = len(self.turns)


@dataclass(frozen=True, kw_only=True)
class AnswerJob:
    """Prompts to be answered by one or several processes, each of which keeps what is finished in `folder`."""

    target: Target
    prompts: Sequence[Prompt]
    config: AnswersConfig
    seed: int
    folder: Path
    fingerprint: str

    def work(self, *, rank: int, num_processes: int, writes: bool = True) -> None:
        """Answer this process's share of the prompts, except those that are answered; without `writes` only compute them."""
        needs = [self._room(number) for number in range(len(self.prompts))]
        order = sorted(range(len(needs)), key=lambda number: (-needs[number], number))  # the longest first
        own, finished = order[rank::num_processes], self.finished()
        missing = [number for number in own if number not in finished]
        journal, group = self.journal(rank), dict[str, Any]()
        source = TargetSource(
            self.target, self.config, capacity=min(self.target.max_positions, needs[missing[0]]) if missing else 0
        )
        with progress("answers", len(own), "prompts", done=len(own) - len(missing)) as advance:

            def keep() -> None:
                if writes:
                    journal.extend(group)
                advance(len(group))
                group.clear()

            def following(number: int, dialogue: Dialogue, answer: Sequence[int] | None = None) -> Request | None:
                if answer is not None:
                    dialogue.take(answer)
                if (request := dialogue.ask()) is not None:
                    request.on_done = partial(following, number, dialogue)
                    return request
                group[str(number)] = dialogue.piece
                if len(group) == self.config.batch_size:  # a write to the disk waits for it: several at a time
                    keep()
                return None

            first = (following(number, self.dialogue(number)) for number in missing)
            requests = (request for request in first if request is not None)
            continue_requests(source, requests, seed=self.seed, batch_size=self.config.batch_size)
            if group:
                keep()

    def dialogue(self, number: int) -> Dialogue:
        return Dialogue(self.target, self.prompts[number], self._longest)

    @property
    def _longest(self) -> int:
        return self.config.longest or self.target.max_positions

    def journal(self, rank: int) -> Journal:
        return Journal(self.folder / ANSWER_JOURNALS.format(rank=rank), self.fingerprint)

    def finished(self) -> set[int]:
        return {number for _, number, _, _ in self._pieces()}

    def collect(self) -> Answered:
        """Return what all processes wrote; `RuntimeError` where one has not finished."""
        places: dict[int, tuple[Journal, Place]] = {}
        dropped = Counter[str]()
        for journal, number, place, piece in self._pieces():
            places[number] = journal, place
            dropped.update(piece["dropped"])
        if missing := len(self.prompts) - len(places):
            raise RuntimeError(f"answers to {missing} prompts are missing in {self.folder}")
        numbers = {prompt.prompt_id: number for number, prompt in enumerate(self.prompts)}

        def rows_of(prompt: Prompt) -> list[Conversation]:
            journal, place = places[numbers[prompt.prompt_id]]
            return [Conversation.from_dict(row) for row in journal.piece(place)["rows"]]

        return Answered(rows_of, dropped)

    def _room(self, number: int) -> int:
        """Return about how many positions a prompt's turns take, their answers at their longest."""
        prompt = self.prompts[number]
        length = prompt.num_tokens or len(prompt.user_text)
        answers = len(prompt.turns) * self._longest
        return length + answers + sum(len(turn) + TEMPLATE_TOKENS for turn in prompt.turns[1:])

    def _pieces(self) -> Iterator[tuple[Journal, int, Place, Any]]:
        """Yield what is finished: its journal, the prompt's number, its place and its content."""
        for path in sorted(self.folder.glob(ANSWER_JOURNALS.format(rank="*"))):
            journal = Journal(path, self.fingerprint)
            yield from ((journal, int(key), place, piece) for key, place, piece in journal.scan())


def existing_answers(target: Target, max_new_tokens: int | None, left_out: LeftOut) -> Answered:
    """Encode every turn of prompts with the answer that it brings, longer ones cut off at `max_new_tokens`."""
    dropped, omissions = Counter[str](), Omissions()

    def rows_of(prompt: Prompt) -> list[Conversation]:
        rows = []
        for number, turn in enumerate(turns_of(prompt)):
            if (answer := answer_of(turn)) is None:
                continue
            try:
                outcome = _existing(target, turn, number, answer, max_new_tokens, omissions)
            except BadRow as error:
                (left_out.count if error.reason == NOT_A_CONTINUATION else left_out.add)(error)
                continue
            if isinstance(outcome, str):
                dropped[outcome] += 1
            else:
                rows.append(outcome)
        return rows

    return Answered(rows_of, dropped, omissions.warn)


def _existing(
    target: Target, prompt: Prompt, turn: int, answer: Message, max_new_tokens: int | None, omissions: Omissions
) -> Conversation | str:
    """Return a turn with the answer that it brings, or the reason why it is dropped; `BadRow` where it has no tokens."""
    prompt_ids, messages = encode_prompt(target, prompt), (*prompt.messages, answer)
    asked = prompt.text_of(target, prompt.messages)
    try:
        whole = prompt.text_of(target, messages, answer_follows=False)
    except InputError as error:
        raise BadRow(NOT_ENCODED, f"prompt {prompt.prompt_id}: {error}", prompt.where) from error
    text = answer_text(asked, whole, messages)
    if text is None:
        tails = f"the prompt ends in {asked[-40:]!r}, the answered chat in {whole[-80:]!r}"
        raise BadRow(NOT_A_CONTINUATION, f"prompt {prompt.prompt_id}: {tails}, which does not continue it", prompt.where)
    omissions.note(asked + text, messages, prompt.tools, prompt.where)
    ids = prompt.encode(target, asked + text)
    # Where the tokenizer merges the prompt's end with the answer's beginning, the target would still write the latter alone.
    answer_ids = ids[len(prompt_ids) :] if tuple(ids[: len(prompt_ids)]) == prompt_ids else target.encode(text)
    room = target.max_positions - len(prompt_ids)
    answer_ids = up_to_end(answer_ids, target.eos_token_ids)[: min(max_new_tokens or room, room)]
    return _conversation(target, prompt, turn, messages, prompt_ids, answer_ids)


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
        of_ids=prompt.of_ids,
        prompt_ids=prompt_ids,
        answer_ids=tuple(answer_ids),
        ended=ended,
        media_prompt=target.media_prompt(messages[:-1], prompt.media, tools=prompt.tools),
    )

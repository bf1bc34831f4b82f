"""Prompts to conversations: answers written turn by turn, or taken from the data set.

`answer_prompts` lets a writer (the target here, or a server) answer a batch of prompts; an `AnswerJob` shares the batches of a
data set between processes and resumes them. Batches are formed from all prompts before any process takes its part, so the rows
depend neither on the number of processes nor on interruptions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.progress import progress
from configs.runtime.resumable import Journal
from configs.schema.data import AnswersConfig
from distill.dataset.conversations import Conversation, Message
from distill.generation.continuation import continue_tokens, request_number, up_to_end
from distill.generation.prompts import Prompt, encode_prompt
from heads.target.loading import Target

# Why a turn has no answer.
EMPTY = "empty_answer"  # it ended at once
NO_ROOM = "no_room_in_context"  # the conversation so far fills the context of the target, or the shorter one of the server
UNREACHED = "turn_after_a_dropped_one"
NOT_A_CONTINUATION = "answer_does_not_continue_its_prompt"  # the chat template writes the prompt differently before an answer

# Continues prompts of token ids, given the number and the most new tokens of each; a reason where there is no continuation.
Write = Callable[[Sequence[Sequence[int]], Sequence[int], Sequence[int]], Sequence[list[int] | str]]

ANSWER_JOURNALS = ".answers.partial-{rank}.jsonl"


@dataclass(frozen=True, kw_only=True)
class Answered:
    """Conversations in the order of their prompts, the number of dropped turns by reason, and the servers that answered."""

    conversations: tuple[Conversation, ...]
    dropped: dict[str, int]
    servers: tuple[dict[str, Any], ...] = ()  # each of them once, as the manifest describes it


@dataclass(frozen=True, kw_only=True)
class AnswerJob:
    """Prompts to be answered by one or several processes, each of which keeps its finished batches in `folder`.

    `write` is used in place of the target's plain decoding (`answer_prompts`).
    """

    target: Target
    prompts: Sequence[Prompt]
    config: AnswersConfig
    seed: int
    folder: Path
    fingerprint: str
    write: Write | None = None

    def work(self, *, rank: int, num_processes: int) -> None:
        """Answer this process's share of the batches, except those that are finished."""
        batches = self._batches()
        mine = range(rank, len(batches), num_processes)
        done = self._finished()
        journal = Journal(self.folder / ANSWER_JOURNALS.format(rank=rank), self.fingerprint)
        with progress("answers", sum(len(batches[number]) for number in mine), "prompts") as advance:
            for number in mine:
                if str(number) not in done:
                    journal.append(str(number), self._answer(batches[number]))
                advance(len(batches[number]))

    def collect(self) -> Answered:
        """Return what all processes wrote; `RuntimeError` where one has not finished."""
        finished = self._finished()
        missing = [number for number in range(len(self._batches())) if str(number) not in finished]
        if missing:
            raise RuntimeError(f"{len(missing)} batches of answers are missing in {self.folder}, the first is {missing[0]}")
        order = {prompt.prompt_id: place for place, prompt in enumerate(self.prompts)}
        rows = [Conversation.from_dict(row, "a finished batch") for batch in finished.values() for row in batch["rows"]]
        dropped = Counter[str]()
        for batch in finished.values():
            dropped.update(batch["dropped"])
        servers = {str(server): server for batch in finished.values() for server in batch.get("servers", ())}
        return Answered(
            conversations=tuple(sorted(rows, key=lambda row: (order[row.prompt_id], row.turn))),
            dropped=dict(sorted(dropped.items())),
            servers=tuple(servers[each] for each in sorted(servers)),
        )

    def _batches(self) -> list[list[Prompt]]:
        """Return the prompts in batches of similar length: less padding, and rows that end at similar times."""
        by_length = sorted(self.prompts, key=lambda prompt: (len(prompt.user_text), prompt.prompt_id))
        size = self.config.batch_size
        return [by_length[start : start + size] for start in range(0, len(by_length), size)]

    def _finished(self) -> dict[str, Any]:
        return read_journals(self.folder, ANSWER_JOURNALS, self.fingerprint)

    def _answer(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        rows, dropped = answer_prompts(self.target, prompts, self.config, seed=self.seed, write=self.write)
        return {"rows": [asdict(row) for row in rows], "dropped": dropped}


def read_journals(folder: Path, name: str, job: str) -> dict[str, Any]:
    """Return the entries of a job that all processes have written; `name` is the journals' name with a place for the rank."""
    paths = sorted(folder.glob(name.format(rank="*")))
    return {key: entry for path in paths for key, entry in Journal(path, job).read().items()}


def answer_prompts(
    target: Target, prompts: Sequence[Prompt], config: AnswersConfig, *, seed: int, write: Write | None = None
) -> tuple[list[Conversation], dict[str, int]]:
    """Answer a batch of prompts turn by turn, each later turn after the answers to those before.

    `write` is used in place of the target, whose template and end-of-text tokens count; for `seed` see `continue_tokens`.

    Returns:
        One conversation for each answered turn, and the number of dropped turns by reason.
    """

    def write_here(ids: Sequence[Sequence[int]], requests: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        return continue_tokens(target, ids, config, max_new_tokens=limits, seed=seed, requests=requests)

    default = config.max_new_tokens
    conversations: list[Conversation] = []
    dropped = Counter[str]()
    open_rows = [(prompt, list(prompt.history)) for prompt in prompts]
    turn = 0
    while open_rows:
        messages = [[*said, {"role": "user", "content": prompt.turns[turn]}] for prompt, said in open_rows]
        answered = _answer_turn(target, [prompt for prompt, _ in open_rows], messages, turn, write or write_here, default)
        still_open = []
        for (prompt, _), outcome in zip(open_rows, answered, strict=True):
            num_left = len(prompt.turns) - turn - 1
            if isinstance(outcome, str):
                dropped.update({outcome: 1, UNREACHED: num_left})
                continue
            conversations.append(outcome)
            if num_left:
                still_open.append((prompt, list(outcome.messages)))
        open_rows = still_open
        turn += 1
    return conversations, {reason: count for reason, count in dropped.items() if count}


def _answer_turn(
    target: Target, prompts: Sequence[Prompt], messages: Sequence[list[Message]], turn: int, write: Write, max_new_tokens: int
) -> list[Conversation | str]:
    """Return each prompt's answered turn, or the reason why there is none."""
    tools = [prompt.tools for prompt in prompts]
    encoded = [tuple(target.encode_chat(said, tools=each)) for said, each in zip(messages, tools, strict=True)]
    fitting = [index for index, ids in enumerate(encoded) if len(ids) < target.max_positions]
    requests = [request_number(f"{prompts[index].prompt_id}/{turn}") for index in fitting]
    limits = [prompts[index].max_new_tokens or max_new_tokens for index in fitting]
    answers = write([encoded[index] for index in fitting], requests, limits)
    outcomes: list[Conversation | str] = [NO_ROOM] * len(prompts)
    for index, answer_ids in zip(fitting, answers, strict=True):
        if isinstance(answer_ids, str):
            outcomes[index] = answer_ids
            continue
        text = str(target.tokenizer.decode(answer_ids, skip_special_tokens=True))
        answered = (*messages[index], {"role": "assistant", "content": text})
        outcomes[index] = _conversation(target, prompts[index], turn, answered, encoded[index], answer_ids)
    return outcomes


def check_given(prompts: Sequence[Prompt]) -> None:
    """Raise `InputError` where a prompt, which is named, brings no answer."""
    without = [prompt.prompt_id for prompt in prompts if prompt.answer is None]
    if without:
        raise InputError(
            f"answers.written_by is 'dataset', and {len(without)} of {len(prompts)} prompts bring no answer, the first is "
            f"{without[0]}: expected chat messages that end with one by the assistant; correct or leave out those rows, or set "
            "answers.written_by=target"
        )


def existing_answers(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> Answered:
    """Encode prompts with the answers that they bring (`check_given`), longer ones cut off at `max_new_tokens`.

    A draft learns less from them than from the target's own.

    Raises:
        InputError: a prompt fills the target's context, or its template refuses the conversation.
    """
    outcomes = [_encode_existing(target, prompt, max_new_tokens) for prompt in prompts]
    dropped = Counter(sorted(outcome for outcome in outcomes if isinstance(outcome, str)))
    return Answered(conversations=tuple(outcome for outcome in outcomes if not isinstance(outcome, str)), dropped=dict(dropped))


def _encode_existing(target: Target, prompt: Prompt, max_new_tokens: int) -> Conversation | str:
    """Return a prompt's conversation, or the reason why there is none."""
    prompt_ids = encode_prompt(target, prompt)
    messages = (*prompt.messages, {"role": "assistant", "content": str(prompt.answer)})
    whole = target.encode_chat(messages, tools=prompt.tools, answer_follows=False)
    if tuple(whole[: len(prompt_ids)]) != prompt_ids:
        return NOT_A_CONTINUATION
    longest = min(prompt.max_new_tokens or max_new_tokens, target.max_positions - len(prompt_ids))
    answer_ids = up_to_end(whole[len(prompt_ids) :], target.eos_token_ids)[:longest]
    return _conversation(target, prompt, 0, messages, prompt_ids, answer_ids)


def _conversation(
    target: Target,
    prompt: Prompt,
    turn: int,
    messages: tuple[Message, ...],
    prompt_ids: tuple[int, ...],
    answer_ids: Sequence[int],
) -> Conversation | str:
    """Return an answered turn, or `EMPTY` where the answer holds nothing but its end."""
    ended = bool(answer_ids) and answer_ids[-1] in target.eos_token_ids
    if len(answer_ids) == ended:
        return EMPTY
    return Conversation(
        prompt_id=prompt.prompt_id,
        category=prompt.category,
        turn=turn,
        messages=messages,
        tools=prompt.tools,
        prompt_ids=prompt_ids,
        answer_ids=tuple(answer_ids),
        ended=ended,
    )

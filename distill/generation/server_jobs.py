"""Answers and self-seeded turns by a server: the same jobs as for the local target, shared by processes and resumed.

Each answer is kept as it comes, and the order in which answers come leaves no trace in the data. Self-seeded turns need token
ids, since text does not show special tokens, and a chat template that ends a user's turn by a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from configs.runtime.errors import InputError
from configs.runtime.progress import Tokens, progress
from configs.runtime.resumable import Journal, fingerprint
from configs.schema.data import DataConfig, PromptsConfig
from configs.schema.decoding import SamplingConfig
from distill.generation.answers import ANSWER_JOURNALS, AnswerJob, Dialogue, answer_together
from distill.generation.prompts import Prompt
from distill.generation.self_seeding import Turn, UserFrame, read_turn, turn_request
from distill.generation.server_completions import ServerWriter, read_ids
from distill.server.concurrency import ask_all, naming

Item = TypeVar("Item")

TURN_JOURNALS = ".turns.partial-{rank}.jsonl"


@dataclass(frozen=True, kw_only=True)
class ServerAnswerJob(AnswerJob):
    """Prompts to be answered by a server, for one or several processes; a batch is one prompt with all its turns."""

    writer: ServerWriter
    version: str | None  # of the server, where it reports one

    def work(self, *, rank: int, num_processes: int, writes: bool = True) -> None:
        """Ask for this process's share of the prompts that are not answered; see `distill.server.concurrency.ask_all`."""
        if not writes:
            return
        mine, finished = range(rank, len(self.prompts), num_processes), self.finished()
        missing = {str(number): self.prompts[number] for number in mine if not finished[number]}
        journal = Journal(self.folder / ANSWER_JOURNALS.format(rank=rank), self.fingerprint)
        with progress("answers", len(mine), "prompts", done=len(mine) - len(missing)) as advance:
            _ask_missing(self.writer, missing, self._answer, journal, advance)

    def _answer(self, prompt: Prompt) -> dict[str, Any]:
        states = set[str | None]()

        def write(ids: Sequence[Sequence[int]], requests: Sequence[int], limits: Sequence[int]) -> list[list[int] | str]:
            written = [self.writer.write(*each) for each in zip(ids, requests, limits, strict=True)]
            states.update(each.system_fingerprint for each in written)
            return [each.answer for each in written]

        dialogue = Dialogue(number=0, prompt=prompt)
        with naming(f"prompt {prompt.prompt_id}"):
            answer_together(self.target, [dialogue], self.config.max_new_tokens, write)
        servers = [{"version": self.version, "system_fingerprint": state} for state in sorted(states, key=str)]
        return dialogue.piece | {"servers": servers}


def server_answer_job(
    config: DataConfig, prompts: Sequence[Prompt], content: str, folder: Path, writer: ServerWriter
) -> ServerAnswerJob:
    """Return the job of asking a server for all answers; `content` is a hash of the prompts.

    Each prompt fits the target's context; those that do not fit the server's are dropped and counted.
    """
    return ServerAnswerJob(
        target=writer.target,
        prompts=prompts,
        config=config.answers,
        seed=config.seed,
        folder=folder,
        fingerprint=fingerprint(writer.fingerprint_parts(), config.answers.model_dump(exclude={"batch_size"}), content),
        writer=writer,
        version=writer.server.connection.version(),
    )


def server_turns(
    writer: ServerWriter,
    config: PromptsConfig,
    folder: Path,
    rank: int,
    frame: UserFrame,
    numbers: Sequence[int],
    tokens: Tokens,
    *,
    name: str = "",
) -> Iterator[Turn]:
    """Return the turns of these numbers in their order, asking a server for those that no journal holds.

    Their `tokens` are not counted: the turns that have come are.

    `name` is that of the source of prompts, where there are several.

    Raises:
        InputError: the template ends a user's turn by plain text, or see `distill.server.concurrency.ask_all`.
    """
    if not frame.end_ids:
        raise InputError(
            f"the chat template of target {writer.target.identity.name} ends a user's turn by plain text, which a server "
            "cannot be asked to stop at: give prompts.source file or dataset"
        )
    job = fingerprint(writer.fingerprint_parts(), config.model_dump(exclude={"num_prompts", "category"}), name)
    found = _read_journals(folder, TURN_JOURNALS, job)
    missing = {str(number): number for number in numbers if str(number) not in found}
    journal = Journal(folder / TURN_JOURNALS.format(rank=rank), job)
    with progress("turns asked for", len(missing), "turns") as advance:
        _ask_missing(writer, missing, lambda number: _ask_turn(writer, config, frame, number, name), journal, advance)
    texts = found | journal.read()
    return ((number, texts[str(number)]) for number in numbers)


def _read_journals(folder: Path, name: str, job: str) -> dict[str, Any]:
    """Return the entries of a job that all processes have written; `name` is the journals' name with a place for the rank."""
    paths = sorted(folder.glob(name.format(rank="*")))
    return {key: entry for path in paths for key, entry in Journal(path, job).read().items()}


def _ask_turn(writer: ServerWriter, config: PromptsConfig, frame: UserFrame, number: int, name: str) -> str | None:
    """Return the text of a turn, None where it is unusable."""
    target, limit = writer.target, config.max_prompt_tokens
    if len(frame.prefix_ids) + limit > writer.max_positions:
        raise InputError(
            f"prompts.max_prompt_tokens: {limit} tokens after the chat template's {len(frame.prefix_ids)} do not fit the "
            f"server's context of {writer.max_positions}"
        )
    sampling = SamplingConfig(temperature=config.temperature, top_p=config.top_p)
    end_ids = sorted({*frame.end_ids, *target.eos_token_ids})
    with naming(f"self-seeded turn {number}"):
        completion = replace(writer, sampling=sampling).ask(
            frame.prefix_ids, turn_request(number, name), limit, end_ids=end_ids
        )
    return read_turn(target, frame, read_ids(completion, limit, end_ids, target.vocab_size, writer.where))


def _ask_missing(
    writer: ServerWriter,
    missing: Mapping[str, Item],
    ask: Callable[[Item], Any],
    journal: Journal,
    advance: Callable[[int], None],
) -> None:
    """Ask for what is missing, several requests at a time, and keep each answer as it comes."""

    def keep(key: str, answer: Any) -> None:
        journal.append(key, answer)
        advance(1)

    ask_all(writer.server.connection, missing, ask, keep, failures_in_a_row=writer.config.failures_in_a_row)

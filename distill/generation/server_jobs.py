"""Self-seeded prompts by a server: user turns that it writes behind the chat template's opening of one.

The same turns by number as far as their settings go, with the same rules of which can be used
(`distill.generation.self_seeding`); each is a request with a seed of its own, and is kept as it comes. Left out on purpose:
templates that end a user's turn by plain text, and servers that return text, which show no special token.


Answers by a server: the job that asks for them, shared by processes and resumed as the local one
(`distill.generation.answers`).

A piece is one prompt with all its turns, so that nothing but the answers under way is lost. The order in which answers come
leaves no trace in the data: rows are sorted by prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.progress import progress
from configs.runtime.resumable import Journal, fingerprint
from configs.schema.data import DataConfig, PromptsConfig
from configs.schema.decoding import SamplingConfig
from distill.generation.answers import PIECES, AnswerJob, answer_prompts, request_number
from distill.generation.prompts import Prompt
from distill.generation.self_seeding import Turn, UserFrame, read_turn
from distill.generation.server_completions import ServerWriter, read_ids
from distill.server.concurrency import ask_all, naming


@dataclass(frozen=True, kw_only=True)
class ServerAnswerJob(AnswerJob):
    """Prompts to be answered by a server, for one or several processes."""

    writer: ServerWriter
    version: str | None  # of the server, where it says it

    def work(self, *, rank: int, num_processes: int) -> None:
        """Ask for this process's share of the prompts, all but those answered before.

        Raises:
            InputError: see `distill.server.concurrency.ask_all`.
        """
        done = self._finished()
        mine = {str(number): prompt for number, prompt in enumerate(self.prompts) if number % num_processes == rank}
        missing = {key: prompt for key, prompt in mine.items() if key not in done}
        pieces = Journal(self.folder / PIECES.format(rank=rank), self.fingerprint)
        with progress("answers", len(mine), "prompts") as advance:

            def keep(key: str, piece: dict[str, Any]) -> None:
                pieces.append(key, piece)
                advance(1)

            advance(len(mine) - len(missing))
            ask_all(
                self.writer.server.connection,
                missing,
                lambda prompt: self._answer([prompt]),
                keep,
                failures_in_a_row=self.writer.config.failures_in_a_row,
            )

    def _batches(self) -> list[list[Prompt]]:
        return [[prompt] for prompt in self.prompts]

    def _answer(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        states = set[str | None]()

        def write(prompts_ids: Sequence[Sequence[int]], requests: Sequence[int]) -> list[list[int] | str]:
            limit = self.config.max_new_tokens
            written = [self.writer.write(ids, request, limit) for ids, request in zip(prompts_ids, requests, strict=True)]
            states.update(each.system_fingerprint for each in written)
            return [each.answer for each in written]

        with naming(f"prompt {prompts[0].prompt_id}"):
            rows, dropped = answer_prompts(self.target, prompts, self.config, seed=self.seed, write=write)
        servers = [{"version": self.version, "system_fingerprint": state} for state in sorted(states, key=str)]
        return {"rows": [asdict(row) for row in rows], "dropped": dropped, "servers": servers}


def server_answer_job(
    config: DataConfig, prompts: Sequence[Prompt], content: str, folder: Path, writer: ServerWriter
) -> ServerAnswerJob:
    """Return the job of asking a server for all answers.

    Args:
        config: how they are to be written.
        prompts: each of which fits the target's context; those that do not fit the server's are dropped and counted.
        content: a hash of the prompts.
        folder: takes the pieces.
        writer: asks the server.
    """
    return ServerAnswerJob(
        target=writer.target,
        prompts=prompts,
        config=config.answers,
        seed=config.seed,
        folder=folder,
        fingerprint=fingerprint(writer.asked(), config.answers.model_dump(exclude={"batch_size"}), content),
        writer=writer,
        version=writer.server.connection.version(),
    )


TURN_PIECES = ".turns.partial-{rank}.jsonl"


@dataclass(frozen=True, kw_only=True)
class ServerTurns:
    """Writes turns by asking a server.

    Args:
        writer: asks it.
        config: how long turns are, and how random.
        folder: takes the turns that were written.
        rank: of this process.
    """

    writer: ServerWriter
    config: PromptsConfig
    folder: Path
    rank: int

    def __call__(self, frame: UserFrame, numbers: Sequence[int]) -> Iterator[Turn]:
        """Yield the turns asked for, those written before among them, in the order of their numbers.

        Raises:
            InputError: the template ends a user's turn by plain text, or see `distill.server.concurrency.ask_all`.
        """
        if not frame.end_ids:
            raise InputError(
                f"the chat template of target {self.writer.target.identity.name} ends a user's turn by plain text, which a "
                "server cannot be asked to stop at: give prompts.source file or dataset"
            )
        job = fingerprint(self.writer.asked(), self.config.model_dump(exclude={"num_prompts", "category"}))
        found = sorted(self.folder.glob(TURN_PIECES.format(rank="*")))
        texts = {key: text for path in found for key, text in Journal(path, job).read().items()}
        missing = {str(number): number for number in numbers if str(number) not in texts}
        pieces = Journal(self.folder / TURN_PIECES.format(rank=self.rank), job)
        with progress("turns asked for", len(missing), "turns") as advance:

            def keep(key: str, text: str | None) -> None:
                texts[key] = text
                pieces.append(key, text)
                advance(1)

            ask_all(
                self.writer.server.connection,
                missing,
                lambda number: self._write(frame, number),
                keep,
                failures_in_a_row=self.writer.config.failures_in_a_row,
            )
        return ((number, texts[str(number)]) for number in numbers)

    def _write(self, frame: UserFrame, number: int) -> str | None:
        """Return the text of a turn, None where it is of no use."""
        target, limit = self.writer.target, self.config.max_prompt_tokens
        if len(frame.prefix_ids) + limit > self.writer.max_positions:
            raise InputError(
                f"prompts.max_prompt_tokens: {limit} tokens after the chat template's {len(frame.prefix_ids)} do not fit the "
                f"server's context of {self.writer.max_positions}"
            )
        sampling = SamplingConfig(temperature=self.config.temperature, top_p=self.config.top_p)
        end_ids = sorted({*frame.end_ids, *target.eos_token_ids})
        asking = replace(self.writer, sampling=sampling)
        with naming(f"self-seeded turn {number}"):
            completion = asking.ask(frame.prefix_ids, request_number(f"self-{number}"), limit, end_ids=end_ids)
        ids = read_ids(completion, limit, end_ids, target.vocab_size, f"server.url: {self.writer.config.url}")
        return read_turn(target, frame, ids)

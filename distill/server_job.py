"""Answers by a server: the job that asks for them, shared by processes and resumed as the local one (`distill.answers`).

A piece is one prompt with all its turns, so that nothing but the answers under way is lost. The order in which answers come
leaves no trace in the data: rows are sorted by prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.progress import progress
from configs.schema import DataConfig
from distill.answers import PIECES, AnswerJob, answer_prompts
from distill.asking import ask_all, naming
from distill.partial import PartialFile, fingerprint
from distill.prompts import Prompt
from distill.server_writing import ServerWriter


@dataclass(frozen=True, kw_only=True)
class ServerAnswerJob(AnswerJob):
    """Prompts to be answered by a server, for one or several processes."""

    writer: ServerWriter
    version: str | None  # of the server, where it says it

    def work(self, *, rank: int, num_processes: int) -> None:
        """Ask for this process's share of the prompts, all but those answered before.

        Raises:
            InputError: see `distill.asking.ask_all`.
        """
        done = self._finished()
        mine = {str(number): prompt for number, prompt in enumerate(self.prompts) if number % num_processes == rank}
        missing = {key: prompt for key, prompt in mine.items() if key not in done}
        pieces = PartialFile(self.folder / PIECES.format(rank=rank), self.fingerprint)
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

"""Answers by a server: the job that asks for them, shared by processes and resumed as the local one (`distill.answers`).

A piece is one prompt with all its turns, so that nothing but the answers under way is lost. The order in which answers come
leaves no trace in the data: rows are sorted by prompt. Before a long run the server is held against the local target, which
is loaded for that, for its tokenizer and for its identity in the manifest.
P probed positions, V tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from configs.decoding import SamplingConfig
from configs.errors import InputError
from configs.progress import progress
from configs.schema import DataConfig
from distill.answers import PIECES, AnswerJob, answer_prompts
from distill.asking import ask_all
from distill.batches import Example
from distill.cache_format import Layout
from distill.conversations import FORMAT_VERSION
from distill.partial import PartialFile, fingerprint
from distill.prompts import Prompt
from distill.server import TargetServer
from distill.server_rows import PROBE_POSITIONS, check_serves, local_law
from distill.server_writing import ServerWriter
from distill.target import Target

logger = logging.getLogger("draftsmith")

PROBE_PROMPTS = 8  # of these the first whose answer can be read is compared


@dataclass(frozen=True, kw_only=True)
class ServerAnswerJob(AnswerJob):
    """Prompts to be answered by a server, for one or several processes."""

    writer: ServerWriter
    version: str | None  # of the server, where it says it

    def check(self) -> None:
        """Refuse a server that is not the target's, before anything is asked for. One process does it.

        Raises:
            InputError: it says, or writes, what the target does not; or it fails.
        """
        probes = [self.target.encode_chat(prompt.messages) for prompt in self.prompts[:PROBE_PROMPTS]]
        if not probes:
            return
        if self.writer.config.answers_as == "text":
            check_writes(self.writer, probes)
            return
        vocab_size = min(self.target.vocab_size, len(self.target.tokenizer))
        layout = Layout(kind="top_k", dtype="float32", width=1, vocab_size=vocab_size)
        check_serves(self.writer.server, self.target, layout, Example(tuple(probes[0]), 1))

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

        rows, dropped = answer_prompts(self.target, prompts, self.config, seed=self.seed, write=write)
        servers = [{"version": self.version, "system_fingerprint": state} for state in sorted(states, key=str)]
        return {"rows": [asdict(row) for row in rows], "dropped": dropped, "servers": servers}


def server_answer_job(
    config: DataConfig, target: Target, prompts: Sequence[Prompt], content: str, folder: Path, server: TargetServer
) -> ServerAnswerJob:
    """Return the job of asking a server for all answers.

    Its fingerprint names everything that decides what is asked. The server counts by what it calls the target, without its
    address: one that moved goes on where it was, after it has shown again what it serves.

    Args:
        config: with a server.
        target: the same model here.
        prompts: each of which fits the target's context; those that do not fit the server's are dropped and counted.
        content: a hash of the prompts.
        folder: takes the pieces.
        server: the one that the config describes.

    Raises:
        InputError: it is not there, or has no such model.
    """
    if config.server is None:
        raise ValueError("expected a config with a server")
    served = server.check_model().max_model_len or target.max_positions
    max_positions = min(served, target.max_positions)
    if max_positions < target.max_positions:
        logger.info("the server's context of %d tokens is shorter than the target's, and counts", max_positions)
    asked = config.answers.model_dump(exclude={"batch_size"})
    ways = [config.server.model, config.server.answers_as, config.server.on_other_tokens]
    return ServerAnswerJob(
        target=target,
        prompts=prompts,
        config=config.answers,
        seed=config.seed,
        folder=folder,
        fingerprint=fingerprint(
            FORMAT_VERSION, "server", ways, target.identity.to_dict(), config.seed, max_positions, asked, content
        ),
        writer=ServerWriter(
            server=server,
            config=config.server,
            target=target,
            sampling=config.answers,
            seed=config.seed,
            max_positions=max_positions,
        ),
        version=server.connection.version(),
    )


@torch.no_grad()
def check_writes(writer: ServerWriter, probes: Sequence[Sequence[int]]) -> None:
    """Refuse a server whose greedy answer is not what the target finds likeliest: all that text alone can show.

    Compared is the log-probability that the target gives its own likeliest token and the server's, at each token of the first
    of the answers that can be read as token ids. It is 0 for the target itself and, unlike the comparison of log-probabilities
    (`distill.server_rows.check_serves`), small for any model that mostly agrees with it.

    Args:
        writer: asks the server.
        probes: token ids of prompts.

    Raises:
        InputError: on average they differ by more than `server.probe_tolerance` nats, no answer can be read, or the server
            fails.
    """
    greedy = replace(writer, sampling=SamplingConfig(), config=writer.config.model_copy(update={"on_other_tokens": "drop"}))
    answers = ((ids, greedy.write(ids, 0, PROBE_POSITIONS).answer) for ids in probes)
    found = next(((ids, answer) for ids, answer in answers if not isinstance(answer, str)), None)
    url, target = writer.config.url, writer.target
    if found is None:
        raise InputError(
            f"server.url: {url} answered {len(probes)} prompts with text that, encoded anew, has other tokens than the server "
            "counts; use a server that answers with token ids (server.answers_as)"
        )
    prompt_ids, answer = found
    log_p_PV = local_law(target, target.vocab_size, Example((*prompt_ids, *answer), len(prompt_ids)))
    lost_P = log_p_PV.amax(-1) - log_p_PV.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    difference, tolerance = float(lost_P.mean()), writer.config.probe_tolerance
    if not difference <= tolerance:
        raise InputError(
            f"server.url: {url} does not serve target {target.identity.name}: its greedy answer lies {difference:.3g} nats a "
            f"token below the target's own, and server.probe_tolerance allows {tolerance:g}"
        )
    logger.info("server %s writes what the target finds likeliest, up to %.3g nats a token", url, difference)

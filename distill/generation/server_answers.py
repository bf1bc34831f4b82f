"""Answers by a server that runs the target: the same job as for the local target, shared by processes and resumed.

Each answer is kept as it comes, and the order in which answers come leaves no trace in the data.

Prompts go out as token ids, with every setting of the sampling, since a server fills in what is left out from the model's own
generation config, and with a seed made from the run's seed and the request's number, so a resumed run asks the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from configs.runtime.errors import InputError
from configs.runtime.resumable import Journal, fingerprint
from configs.runtime.terminal import progress
from configs.schema.data import AnswerServerConfig, DataConfig
from configs.schema.decoding import SamplingConfig
from distill.cache.format import RowLayout
from distill.cache.server_rows import check_serves
from distill.dataset.batches import Example
from distill.dataset.conversations import FORMAT_VERSION
from distill.generation.answers import ANSWER_JOURNALS, NO_ROOM, RETIRED_ANSWERS, AnswerJob, Dialogue
from distill.generation.continuation import request_number, up_to_end
from distill.generation.prompts import Prompt
from distill.server.concurrency import ask_all, naming
from distill.server.connection import GaveUp, Refused
from distill.server.logprobs import TargetServer
from distill.server.responses import Completion, check_read, read_completion
from heads.frozen.loading import Target

logger = logging.getLogger("draftsmith")

UNFINISHED = (None, "abort", "error")  # finish reasons of answers that the server itself broke off
NUM_SEEDS = 2**31  # what every server's seeds can hold
PROBE = "Write one sentence about the sea."  # the conversation by which a server is compared with the target


class Written(NamedTuple):
    """One answer of a server."""

    answer: list[int] | str  # token ids, or the reason why there are none
    system_fingerprint: str | None  # what the server calls its own state


@dataclass(frozen=True, kw_only=True)
class ServerWriter:
    """Continues token ids as the local target would, by asking a server; for several threads at once.

    `max_positions` is the longest context, the target's or the server's, whichever is shorter.
    """

    server: TargetServer
    config: AnswerServerConfig
    target: Target
    sampling: SamplingConfig
    seed: int
    max_positions: int

    def write(self, prompt_ids: Sequence[int], request: int, max_new_tokens: int) -> Written:
        """Return one continuation of at least one token id, by at most `max_new_tokens`.

        Raises:
            GaveUp: no whole answer came after all attempts.
            InputError: the server refuses, or answers what cannot be right.
        """
        max_tokens = min(max_new_tokens, self.max_positions - len(prompt_ids))
        if max_tokens < 1:
            return Written(NO_ROOM, None)
        where, end_ids = self.where, self.target.eos_token_ids
        try:
            content = self.server.connection.send("POST", "completions", self._body(prompt_ids, request, max_tokens))
        except Refused as refused:
            raise InputError(
                f"{where} refuses to continue {len(prompt_ids)} tokens by at most {max_tokens} (status {refused.status}): "
                f"{refused.complaint}"
            ) from refused
        completion = read_completion(content, where)
        check_read(completion, prompt_ids, where)
        finish = completion.choices[0].finish_reason
        if finish in UNFINISHED:
            raise GaveUp(f"{where} broke an answer off (finish_reason {finish!r})")
        if finish not in ("stop", "length"):
            raise InputError(f"{where} ended an answer for another reason than its end or its length: finish_reason {finish!r}")
        ids = read_ids(completion, max_tokens, end_ids, self.target.vocab_size, where)
        return Written(ids, completion.system_fingerprint)

    @property
    def where(self) -> str:
        """What begins each complaint about the server."""
        return f"server.url: {self.config.url}"

    def _body(self, prompt_ids: Sequence[int], request: int, max_tokens: int) -> dict[str, Any]:
        sampling = self.sampling
        return {
            "model": self.config.model,
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "top_k": -1 if sampling.top_k is None else sampling.top_k,  # -1: off, for vLLM, SGLang and llama.cpp alike
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": request_number(f"{self.seed}/{request}") % NUM_SEEDS,
            "stop_token_ids": list(self.target.eos_token_ids),
            "skip_special_tokens": False,  # they are tokens of the answer like others
            "return_token_ids": True,
        }


def server_writer(config: DataConfig, target: Target, server: TargetServer) -> ServerWriter:
    """Return the writer for the server of a config; `InputError` where it cannot be reached or has no such model."""
    if config.server is None:
        raise ValueError("expected a config with a server")
    served = server.check_model().max_model_len or target.max_positions
    if served < target.max_positions:
        logger.info("the server's context of %d tokens is shorter than the target's, and counts", served)
    return ServerWriter(
        server=server,
        config=config.server,
        target=target,
        sampling=config.answers,
        seed=config.seed,
        max_positions=min(served, target.max_positions),
    )


def check_server(writer: ServerWriter) -> None:
    """Raise `InputError` where a server's log-probabilities are not the target's, or it fails."""
    target = writer.target
    vocab_size = min(target.vocab_size, len(target.tokenizer))
    layout = RowLayout(kind="top_k", dtype="float32", width=1, vocab_size=vocab_size)
    probe = target.encode_chat([{"role": "user", "content": PROBE}])
    check_serves(writer.server, target, layout, Example(tuple(probe), 1))


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

            def keep(key: str, answer: dict[str, Any]) -> None:
                journal.append(key, answer)
                advance(1)

            limit = self.writer.config.failures_in_a_row
            ask_all(self.writer.server.connection, missing, self._answer, keep, failures_in_a_row=limit)

    def _answer(self, prompt: Prompt) -> dict[str, Any]:
        states = set[str | None]()
        dialogue = Dialogue(number=0, prompt=prompt)
        with naming(f"prompt {prompt.prompt_id}"):
            while dialogue.ask(self.target):
                limit = prompt.max_new_tokens or self.config.max_new_tokens
                answer, state = self.writer.write(dialogue.encoded, dialogue.request, limit)
                states.add(state)
                dialogue.settle(self.target, answer)
        servers = [{"version": self.version, "system_fingerprint": state} for state in sorted(states, key=str)]
        return dialogue.piece | {"servers": servers}


def server_answer_job(
    config: DataConfig, prompts: Sequence[Prompt], content: str, folder: Path, writer: ServerWriter
) -> ServerAnswerJob:
    """Return the job of asking a server for all answers; `content` is a hash of the prompts.

    Each prompt fits the target's context; those that do not fit the server's are dropped and counted. The job knows the server
    by its name for the target, not by its address, so it resumes where the server has moved.
    """
    target = writer.target
    ways = [writer.config.model, "token_ids", "drop"]  # the last two of an earlier release, whose unfinished runs resume
    server = [FORMAT_VERSION, "server", ways, target.identity.to_dict(), config.seed, writer.max_positions]
    return ServerAnswerJob(
        target=target,
        prompts=prompts,
        config=config.answers,
        seed=config.seed,
        folder=folder,
        fingerprint=fingerprint(server, config.answers.model_dump(exclude={"batch_size"}) | RETIRED_ANSWERS, content),
        writer=writer,
        version=writer.server.connection.version(),
    )


def read_ids(completion: Completion, max_tokens: int, end_ids: Sequence[int], vocab_size: int, where: str) -> list[int]:
    """Return the token ids that a server says it wrote, up to the first that ends an answer.

    Raises:
        InputError: it gives none, too many or too few, ids outside the vocabulary, or ended at a token that ends no answer;
            `where` begins the complaint.
    """
    choice = completion.choices[0]
    if choice.token_ids is None:
        raise InputError(
            f"{where} answers without token ids: it does not know return_token_ids; use a server that does, such as vLLM"
        )
    outside = next((index for index in choice.token_ids if not 0 <= index < vocab_size), None)
    if outside is not None:
        raise InputError(f"{where}: token id {outside} lies outside the target's vocabulary of {vocab_size}")
    ids = up_to_end(choice.token_ids, end_ids)
    if len(ids) > max_tokens:
        raise InputError(f"{where} wrote {len(ids)} tokens where at most {max_tokens} were asked for")
    if ids and ids[-1] in end_ids:
        return ids
    if choice.finish_reason == "stop":
        last, known = ids[-1] if ids else "none", ", ".join(map(str, end_ids)) or "none"
        raise InputError(
            f"{where} ended an answer, and its last token id ({last}) ends no answer of the target ({known}): its end-of-text "
            "tokens are others, or it leaves them out"
        )
    if len(ids) != max_tokens:
        raise InputError(
            f"{where} cut an answer off after {len(ids)} tokens where {max_tokens} were asked for: raise its limits, or lower "
            "answers.max_new_tokens"
        )
    return ids

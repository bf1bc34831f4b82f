"""Answers by a server that runs the target: the same job as for the local target, shared by processes and resumed.

Each answer is kept as it comes, and the order in which answers come leaves no trace in the data. A request that fails at every
attempt ends the run, which resumes without asking for what it has.

Prompts go out as token ids, with every setting of the sampling, since a server fills in what is left out from the model's own
generation config, and with a seed made from the run's seed and the request's number, so a resumed run asks the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from configs.runtime.errors import InputError
from configs.runtime.run_record import fingerprint
from configs.runtime.terminal import progress
from configs.schema.data import DataConfig
from distill.dataset.conversations import FORMAT_VERSION
from distill.generation.answers import NO_ROOM, AnswerJob
from distill.generation.continuation import up_to_end
from distill.generation.prompts import Prompt
from distill.server.connection import Completion, Connection, GaveUp, Refused
from heads.frozen.hidden_states import read_states
from heads.frozen.loading import Target
from heads.inference.causal_lm import head_logits
from heads.sampling.draws import request_number

logger = logging.getLogger("draftsmith")

UNFINISHED = (None, "abort", "error")  # finish reasons of answers that the server itself broke off
KEPT = "the answers so far are kept; rerun the same command to resume"
NUM_SEEDS = 2**31  # what every server's seeds can hold
PROBE = "Write one sentence about the sea."  # the conversation by which a server is compared with the target


@torch.no_grad()
def check_server(server: Connection, target: Target) -> None:
    """Refuse a server whose log-probabilities of its most likely tokens, at each position of a question, are not the target's.

    The manifest of the data names the target's tokenizer, chat template and weights, of which a server reveals none.
    """
    ids = target.encode_chat([{"role": "user", "content": PROBE}])
    body = {"model": server.config.model, "prompt": ids, "temperature": 0, "max_tokens": 1, "return_token_ids": True}
    completion = server.complete(body | {"prompt_logprobs": 1})  # vLLM's; the token generated is not used
    completion.check_read(ids, server.where)
    # Entry j is the distribution of token j given those before it, by token id; the token that follows is there in addition.
    entries = (completion.choices[0].prompt_logprobs or [None])[1:]
    if not entries or not all(entries):
        missing = "answers without log-probabilities of the prompt (prompt_logprobs)"
        raise InputError(f"{server.where} {missing}: use a server that gives them, such as vLLM")
    states = read_states(target.model, torch.tensor([ids], device=target.device), ())
    log_p_TV = head_logits(target.model, states.final_BTE[0]).float().log_softmax(-1).cpu()
    gaps = []
    for entry, log_p_V in zip(entries, log_p_TV, strict=False):
        token, found = max((entry or {}).items(), key=lambda each: each[1].logprob)
        gaps.append(abs(found.logprob - float(log_p_V[token])) if 0 <= token < len(log_p_V) else math.inf)
    difference, tolerance = sum(gaps) / len(gaps), server.config.probe_tolerance
    if not difference <= tolerance:  # also where it is no number
        gap = f"its log-probabilities differ by {difference:.3g} nats on average, and server.probe_tolerance allows"
        raise InputError(f"{server.where} does not serve target {target.identity.name}: {gap} {tolerance:g}")
    logger.info("server %s serves the target: off by %.3g nats on average", server.config.url, difference)


def server_answer_job(
    config: DataConfig, target: Target, prompts: Sequence[Prompt], content: str, folder: Path, server: Connection
) -> ServerAnswerJob:
    """Return the job of asking a server, known by its name for the target, so that it may move; `content` is a hash of the
    prompts, of which those that do not fit the server's context are dropped and counted.
    """
    longest = target.max_positions
    max_positions = min(longest, server.check_model().max_model_len or longest)
    if max_positions < longest:
        logger.info("the server's context of %d tokens is shorter than the target's, and counts", max_positions)
    asked = [FORMAT_VERSION, "server", server.config.model, target.identity.to_dict(), config.seed, max_positions]
    return ServerAnswerJob(
        target=target,
        prompts=prompts,
        config=config.answers,
        seed=config.seed,
        folder=folder,
        fingerprint=fingerprint(asked, config.answers.model_dump(exclude={"batch_size"}), content),
        server=server,
        max_positions=max_positions,
    )


@dataclass(frozen=True, kw_only=True)
class ServerAnswerJob(AnswerJob):
    """Prompts to be answered by a server, for one or several processes."""

    server: Connection
    max_positions: int  # the longest context, the target's or the server's, whichever is shorter

    def work(self, *, rank: int, num_processes: int, writes: bool = True) -> None:
        """Ask for this process's share of the prompts that are not answered; what is under way at an error is kept first."""
        if not writes:
            return
        mine, finished = range(rank, len(self.prompts), num_processes), self.finished()
        missing = [number for number in mine if number not in finished]
        journal, waiting = self.journal(rank), iter(missing)
        asked = dict[Future[dict[str, Any]], int]()
        pool = ThreadPoolExecutor(max_workers=self.server.config.concurrency)
        with progress("answers", len(mine), "prompts", done=len(mine) - len(missing)) as advance, pool:

            def keep(done: Iterable[Future[dict[str, Any]]]) -> None:
                """Keep what has come: each write waits for the disk, and meanwhile more comes."""
                pieces = {future: future.result() for future in done}
                journal.extend({str(asked.pop(future)): piece for future, piece in pieces.items()})
                advance(len(pieces))

            try:
                while True:
                    some = islice(waiting, 2 * self.server.config.concurrency - len(asked))  # not all: answers would pile up
                    asked |= {pool.submit(self._answer, number): number for number in some}
                    if not asked:
                        return
                    keep(wait(asked, return_when=FIRST_COMPLETED).done)
            except BaseException:
                self.server.stop()
                pool.shutdown(cancel_futures=True)
                keep([future for future in asked if not future.cancelled() and future.exception() is None])
                raise

    def _answer(self, number: int) -> dict[str, Any]:
        dialogue = self.dialogue(number)
        try:
            while (request := dialogue.ask()) is not None:
                dialogue.take(self.write(request.prompt_ids, request.number, request.limit - len(request.prompt_ids)))
        except (GaveUp, Refused) as error:
            raise type(error)(f"prompt {self.prompts[number].prompt_id}: {error}; {KEPT}") from error
        return dialogue.piece

    def write(self, prompt_ids: Sequence[int], request: int, max_new_tokens: int) -> list[int] | str:
        """Return one continuation of at least one token id, by at most `max_new_tokens`, or the reason why there is none."""
        max_tokens = min(max_new_tokens, self.max_positions - len(prompt_ids))
        if max_tokens < 1:
            return NO_ROOM
        sampling, where, end_ids = self.config, self.server.where, self.target.eos_token_ids
        body = {
            "model": self.server.config.model,
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "top_k": -1 if sampling.top_k is None else sampling.top_k,  # -1: off, for vLLM, SGLang and llama.cpp alike
            "min_p": sampling.min_p or 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": request_number(f"{self.seed}/{request}") % NUM_SEEDS,
            "stop_token_ids": list(end_ids),
            "skip_special_tokens": False,  # they are tokens of the answer like others
            "return_token_ids": True,
        }
        completion = self.server.complete(body)
        completion.check_read(prompt_ids, where)
        return read_ids(completion, max_tokens, end_ids, self.target.vocab_size, where)


def read_ids(completion: Completion, max_tokens: int, end_ids: Sequence[int], vocab_size: int, where: str) -> list[int]:
    """Return the token ids that a server says it wrote, up to the first that ends an answer."""
    choice = completion.choices[0]
    reason, ids = choice.finish_reason, up_to_end(choice.token_ids or [], end_ids)
    has_ended = bool(ids) and ids[-1] in end_ids
    if reason in UNFINISHED:
        raise GaveUp(f"{where} broke an answer off (finish_reason {reason!r})")
    if choice.token_ids is None:
        raise InputError(f"{where} answers without token ids: use a server that knows return_token_ids, such as vLLM")
    if (outside := next((index for index in ids if not 0 <= index < vocab_size), None)) is not None:
        raise InputError(f"{where}: token id {outside} lies outside the target's vocabulary of {vocab_size}")
    is_full = reason == "length" and len(ids) == max_tokens
    if reason not in ("stop", "length") or len(ids) > max_tokens or not (has_ended or is_full):
        known, last = ", ".join(map(str, end_ids)) or "none", ids[-1] if ids else "none"
        raise InputError(
            f"{where} ended an answer of {len(ids)} tokens (finish_reason {reason!r}, last token {last}) where at most "
            f"{max_tokens} were asked for and the target's answers end by {known}"
        )
    return ids

"""Hidden states of texts from several servers that run the target: each gets work whenever it has time.

A server that fails a request at every attempt is left out from then on and named in the log, and what it had is asked of the
others. An answer is read and its file deleted as soon as it is written, so on disk there are at most as many as requests in
flight.
T positions, A taps, E width of the target.
"""

from __future__ import annotations

import atexit
import logging
import re
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from threading import Event, Lock, Thread

from pydantic import BaseModel, ValidationError
from torch import Tensor

from configs.runtime.errors import InputError
from configs.schema.data import ServerConfig
from configs.schema.target import EngineStatesConfig
from distill.server.connection import Connection, GaveUp, Refused
from distill.server.responses import Completion, Distribution, ModelList
from distill.server.state_files import NotWritten, check_folder, take_states

logger = logging.getLogger("draftsmith")

KEY = "target.states.urls"
START = "start it with the line that scripts/serve_states.py prints for this recipe"
SERVED_AS = "states-{taps}"  # the name under which a server gives the states of these taps, as states-2-15-27-30
SERVED = re.compile(r"states-(\d+(?:-\d+)*)")
NUM_LOGPROBS = 5  # of a checked answer
CLOSING_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class ServedStates:
    """A server's answer: the states of a text, `[T, A, E]`, and its distribution of the next token where that was asked for."""

    states_TAE: Tensor
    next_token: Distribution


class _Transfer(BaseModel):
    """Where a server leaves the states."""

    hidden_states_path: str


class _Answer(Completion):
    """A completion whose states are on disk."""

    kv_transfer_params: _Transfer | None = None


@dataclass
class _Job:
    ids: tuple[int, ...]
    future: Future[ServedStates] = field(default_factory=Future)
    started: bool = False

    def start(self) -> bool:
        """Return whether somebody still waits for it; from then on its future can no longer be cancelled."""
        self.started = self.started or self.future.set_running_or_notify_cancel()
        return self.started


class StateServer:
    """One server; `InputError` where it cannot be reached, or is not one that gives states."""

    def __init__(self, config: EngineStatesConfig, url: str, concurrency: int) -> None:
        self.url, self.concurrency, self.folder = url, concurrency, Path(config.path)
        settings = ServerConfig(
            url=url,
            model="",
            api_key_variable=config.api_key_variable,
            concurrency=concurrency,
            timeout_seconds=config.timeout_seconds,
            retries=config.retries,
        )
        self.connection, self.left_out = Connection(settings, KEY), False
        self.stopping = Event()
        self.model, self.taps = self._model()

    def _model(self) -> tuple[str, list[int]]:
        """Return under which name it gives states, and of which taps."""
        try:
            served = [model.id for model in ModelList.model_validate(self.connection.send("GET", "models")).data]
        except (Refused, ValidationError) as error:
            raise InputError(
                f"{KEY}: {self.url} has no list of models: give an API's address, as http://host:8000/v1"
            ) from error
        for name in served:
            if (found := SERVED.fullmatch(name)) is not None:
                return name, sorted(map(int, found[1].split("-")))
        raise InputError(
            f"{KEY}: {self.url} serves {', '.join(served) or 'no model'}, and no name says which states it gives, as "
            f"states-2-15-27-30 does; {START}"
        )

    def fetch(self, ids: Sequence[int], *, with_next: bool = False) -> ServedStates:
        """Return the states of a text.

        Raises:
            GaveUp, NotWritten: the server failed.
            InputError: it refuses the text, or its answer is of another one.
        """
        body = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0}
        if with_next:
            body |= {"logprobs": NUM_LOGPROBS, "return_tokens_as_token_ids": True}
        where = f"{KEY}: {self.url}"
        try:
            content = self.connection.send("POST", "completions", body)
        except Refused as refused:
            raise InputError(
                f"{where} refuses a text of {len(ids)} tokens, and room for one more (status {refused.status}): "
                f"{refused.complaint}"
            ) from refused
        try:
            answer = _Answer.model_validate(content)
        except ValidationError as error:
            raise InputError(f"{where} gives an answer of another form than vLLM's") from error
        if answer.kv_transfer_params is None:
            raise InputError(f"{where} answers without hidden states; {START}")
        name = PurePosixPath(answer.kv_transfer_params.hidden_states_path).name
        states_TAE, read = take_states(self.folder, name, self.connection.config.timeout_seconds, self.stopping)
        if read != list(ids) or states_TAE.shape[:2] != (len(ids), len(self.taps)):
            raise InputError(
                f"{where} gives states of shape {tuple(states_TAE.shape)} for a text of {len(ids)} tokens, and its name "
                f"{self.model} promises {len(self.taps)} taps of each; {START}"
            )
        return ServedStates(states_TAE=states_TAE, next_token=answer.next_token(where))


class StateServers:
    """Several servers as one queue of work. To be closed.

    Raises:
        InputError: the shared folder or a server cannot be used, or servers give states of different taps.
    """

    def __init__(self, config: EngineStatesConfig) -> None:
        check_folder(Path(config.path))
        self.servers = [StateServer(config, url, limit) for url, limit in zip(config.urls, config.limits, strict=True)]
        self.taps = self.servers[0].taps
        for server in self.servers:
            if server.taps != self.taps:
                first = self.servers[0]
                raise InputError(f"{KEY}: {first.url} gives {first.model} and {server.url} {server.model}; start all alike")
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock, self._gone = Lock(), ""
        threads = [(server, number) for server in self.servers for number in range(server.concurrency)]
        self._threads = [Thread(target=self._work, args=(server,), daemon=True) for server, _ in threads]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # a thread at work while Python ends would abort the process

    def ask(self, ids: Sequence[int]) -> Future[ServedStates]:
        """Return the states of a text, once a server has given them; its error is an `InputError`."""
        job = _Job(tuple(ids))
        with self._lock:
            if self._gone:
                job.future.set_exception(InputError(self._gone))
            else:
                self._jobs.put(job)
        return job.future

    def close(self) -> None:
        """End the work: what is under way is finished where it takes seconds, and the rest is dropped."""
        atexit.unregister(self.close)
        self._end("the servers of hidden states were closed")
        for server in self.servers:
            server.connection.stop()
        deadline = time.monotonic() + CLOSING_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for server in self.servers:
            server.stopping.set()
            server.connection.close()

    def _work(self, server: StateServer) -> None:
        """Do one piece of work after the other, until the end or until the server is left out."""
        while (job := self._jobs.get()) is not None:
            if server.left_out:
                self._again(job)
                return
            if not job.start():
                continue
            try:
                job.future.set_result(server.fetch(job.ids))
            except (GaveUp, NotWritten) as error:
                self._leave_out(server, error)
                self._again(job)
                return
            except BaseException as error:  # whoever waits for the answer is told
                job.future.set_exception(error)

    def _leave_out(self, server: StateServer, error: InputError) -> None:
        with self._lock:
            if server.left_out or self._gone:
                return
            server.left_out = True
            left = sum(not each.left_out for each in self.servers)
        logger.warning("server %s is left out from now on: %s; %d of %d are left", server.url, error, left, len(self.servers))
        if not left:
            self._end(
                f"{KEY}: no server is left, the last to fail was {server.url}: {error}; start one again, and run the same "
                "command again"
            )

    def _again(self, job: _Job) -> None:
        """Put work that a server did not do back into the queue; where no server is left for it, whoever waits is told."""
        with self._lock:
            if not self._gone:
                self._jobs.put(job)
            elif job.start():
                job.future.set_exception(InputError(self._gone))

    def _end(self, reason: str) -> None:
        """Take no more work, and drop what waits."""
        with self._lock:
            self._gone = self._gone or reason
            while not self._jobs.empty():
                waiting = self._jobs.get()
                if waiting is not None and waiting.start():
                    waiting.future.set_exception(InputError(self._gone))
            for _ in self._threads:
                self._jobs.put(None)

"""Hidden states of texts from several servers that run the target: each gets work whenever it has time.

A server leaves the states of a text in a file of a shared folder, as vLLM's connector does. It answers before the file is
written, and until then holds a lock on the empty file `NAME.lock` beside it. Where a file system does not carry locks from node
to node, a file that is not whole yet is tried again until the time is up. A file is deleted once it is read, so there are at
most as many as requests in flight. A server that fails a request at every attempt ends the run.
T positions, A taps, E width of the target.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from threading import Event, Timer

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from configs.runtime.errors import InputError
from configs.runtime.files import inside
from configs.schema.data import ServerConfig
from configs.schema.target import EngineStatesConfig
from distill.server.connection import Connection, Distribution, GaveUp

KEY = "target.states.urls"
START = "start it with the line that draftsmith serve-states prints for this recipe"
SERVED_AS = "states-{taps}"  # the name under which a server gives the states of these taps, as states-2-15-27-30
SERVED = re.compile(r"states-(\d+(?:-\d+)*)")
NUM_LOGPROBS = 5  # of a checked answer
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.001, 0.05
UNWRITTEN_SECONDS = 5.0  # how long a file may be missing while its lock is free: network disks show it late
LEAST_FREE_BYTES = 2**20
CLOSING_SECONDS = 5.0


class NotWritten(InputError):
    """A server answered, and its file did not come."""


@dataclass(frozen=True, kw_only=True)
class ServedStates:
    """A server's answer: the states of a text, `[T, A, E]`, and its distribution of the next token where that was asked for."""

    states_TAE: Tensor
    next_token: Distribution


class StateServer:
    """One server; `InputError` where it cannot be reached, or is not one that gives states."""

    def __init__(self, config: EngineStatesConfig, url: str, concurrency: int) -> None:
        self.url, self.folder = url, Path(config.path)
        shared = config.model_dump(include={"api_key_variable", "timeout_seconds", "retries"})
        settings = ServerConfig(url=url, model="", concurrency=concurrency, **shared)
        self.connection, self.stopping = Connection(settings, KEY), Event()
        served = [model.id for model in self.connection.models()]
        self.model = next(filter(SERVED.fullmatch, served), "")
        if not self.model:
            raise InputError(
                f"{KEY}: {url} serves {', '.join(served) or 'no model'}, and no name says which states it gives, as "
                f"states-2-15-27-30 does; {START}"
            )
        self.taps = sorted(map(int, self.model.split("-")[1:]))

    def fetch(self, ids: Sequence[int], *, with_next: bool = False) -> ServedStates:
        """Return the states of a text; `GaveUp` or `NotWritten` where the server failed."""
        body = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0}
        if with_next:
            body |= {"logprobs": NUM_LOGPROBS, "return_tokens_as_token_ids": True}
        where = self.connection.where
        answer = self.connection.complete(body)
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
    """Several servers, asked by a thread for each request that they take at a time. To be closed."""

    def __init__(self, config: EngineStatesConfig) -> None:
        if not Path(config.path).is_dir() or not os.access(config.path, os.W_OK):  # files are deleted once read
            raise InputError(
                f"target.states.path: {config.path} is no folder here that can be written to; give the one that servers and "
                "training share"
            )
        self.servers = [StateServer(config, url, limit) for url, limit in zip(config.urls, config.limits, strict=True)]
        self.taps = self.servers[0].taps
        for server in self.servers:
            if server.taps != self.taps:
                first = self.servers[0]
                raise InputError(f"{KEY}: {first.url} gives {first.model} and {server.url} {server.model}; start all alike")
        self._idle = SimpleQueue[StateServer]()  # each as often as it takes one more
        for server, limit in zip(self.servers, config.limits, strict=True):
            for _ in range(limit):
                self._idle.put(server)
        self._pool = ThreadPoolExecutor(max_workers=sum(config.limits))

    def ask(self, ids: Sequence[int]) -> Future[ServedStates]:
        """Return the states of a text, once a server has given them; its error is an `InputError`."""
        try:
            return self._pool.submit(self._fetch, tuple(ids))
        except RuntimeError as error:  # the pool was shut down
            raise InputError("the servers of hidden states were closed") from error

    def close(self) -> None:
        """Drop what waits, and end the rest: what is under way is finished where it takes seconds, so that no file is left."""
        for server in self.servers:
            server.connection.stop()
        timer = Timer(CLOSING_SECONDS, self._end)
        timer.start()
        self._pool.shutdown(cancel_futures=True)
        timer.cancel()
        self._end()

    def _end(self) -> None:
        for server in self.servers:
            server.stopping.set()
            server.connection.close()

    def _fetch(self, ids: tuple[int, ...]) -> ServedStates:
        server = self._idle.get()
        try:
            return server.fetch(ids)
        except (GaveUp, NotWritten) as error:
            raise InputError(f"{KEY}: {server.url} failed: {error}; start it again, and run the same command again") from error
        finally:
            self._idle.put(server)


def take_states(folder: Path, name: str, timeout_seconds: float, stopping: Event) -> tuple[Tensor, list[int]]:
    """Return what a server wrote into a file, states `[T, A, E]` and the token ids that it read, and delete its files."""
    path = inside(folder, name, "target.states: a server's answer")
    lock = path.with_name(f"{path.name}.lock")
    deadline, wait = time.monotonic() + timeout_seconds, FIRST_WAIT_SECONDS
    missing_since: float | None = None
    try:
        while True:
            now, problem, held = time.monotonic(), "is not written", _is_held(lock)
            if not held:
                try:
                    tensors = load(path.read_bytes())
                    return tensors["hidden_states"], tensors["token_ids"].tolist()
                except FileNotFoundError:
                    problem = "is not there"
                    missing_since = (missing_since or now) if held is not None else None
                except (SafetensorError, KeyError):
                    problem = "is not whole"
            over = now > deadline or (missing_since is not None and now - missing_since > UNWRITTEN_SECONDS)
            if over or stopping.is_set():
                break
            stopping.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)
    except OSError as error:
        raise InputError(f"target.states.path: {path} cannot be read ({error.strerror})") from error
    finally:
        try:
            for each in (path, lock):
                each.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"target.states.path: {each} cannot be deleted ({error.strerror})") from error
    if (free := shutil.disk_usage(folder).free) < LEAST_FREE_BYTES:
        raise InputError(f"target.states.path: the disk of {folder} is full ({free} bytes are free); free space there")
    raise NotWritten(
        f"its file {path.name} {problem} in target.states.path {folder}: is that the folder it was started with, and has its "
        "disk room?"
    )


def _is_held(lock: Path) -> bool | None:
    """Return whether a server holds the lock; None where there is none, yet or at all."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return True
    return False

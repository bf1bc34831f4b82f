"""The target run by servers: the states of texts, for training and for held-out decoding.

Servers give the residual stream after chosen blocks (taps); that after the last one becomes the final state by the norm here,
and logits by the head here. A server leaves the states of a text in a file of a shared folder, as vLLM's connector does. It
answers before the file is written, and until then holds a lock on the empty file `NAME.lock` beside it. Where a file system
does not carry locks from node to node, a file that is not whole yet is tried again until the time is up. A file is deleted once
it is read. A server that fails a request at every attempt ends the run.
B batch, T positions, A taps, E width of the target.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from threading import Event, Timer
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from configs.runtime.errors import InputError
from configs.runtime.files import inside
from configs.schema.data import ServerConfig
from configs.schema.target import EngineStatesConfig
from distill.dataset.batches import documents_of
from distill.server.connection import Connection, Distribution, GaveUp
from heads.device import upload
from heads.frozen.hidden_states import TargetStates, final_norm, num_blocks, read_states
from heads.frozen.loading import Target
from heads.frozen.placement import ServedForward
from heads.inference.causal_lm import head_logits
from heads.inference.model_checks import probe_ids, relative_error, rounding
from heads.modules.interface import Batch

logger = logging.getLogger("draftsmith")

KEY = "target.states.urls"
START = "start it with the line that draftsmith serve-states prints for this recipe"
SERVED_AS = "states-{taps}"  # the name under which a server gives the states of these taps, as states-2-15-27-30
SERVED = re.compile(r"states-(\d+(?:-\d+)*)")
NUM_LOGPROBS = 5  # of a checked answer
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.001, 0.05
CLOSING_SECONDS = 5.0

Ids = tuple[int, ...]


class NotWritten(InputError):
    """A server answered, and its file did not come."""


class ServedStates(NamedTuple):
    """A server's answer: the states of a text, and the distribution of the next token where that was asked for."""

    states_TAE: Tensor
    next_token: Distribution


class StateServer:
    """One server; `InputError` where it cannot be reached, or is not one that gives states."""

    def __init__(self, config: EngineStatesConfig, url: str) -> None:
        self.url, self.folder = url, Path(config.path)
        shared = config.model_dump(include={"api_key_variable", "concurrency", "timeout_seconds", "retries"})
        self.connection, self.stopping = Connection(ServerConfig(url=url, model="", **shared), KEY), Event()
        served = [model.id for model in self.connection.models()]
        self.model = next(filter(SERVED.fullmatch, served), "")
        if not self.model:
            names = ", ".join(served) or "no model"
            raise InputError(f"{KEY}: {url} serves {names}, and no name says which states it gives; {START}")
        self.taps = sorted(map(int, self.model.split("-")[1:]))

    def fetch(self, ids: Sequence[int], *, with_next: bool = False) -> ServedStates:
        """Return the states of a text; `GaveUp` or `NotWritten` where the server failed."""
        body = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0}
        if with_next:
            body |= {"logprobs": NUM_LOGPROBS, "return_tokens_as_token_ids": True}
        where, answer = self.connection.where, self.connection.complete(body)
        if answer.kv_transfer_params is None:
            raise InputError(f"{where} answers without hidden states; {START}")
        name = PurePosixPath(answer.kv_transfer_params.hidden_states_path).name
        states_TAE, read = take_states(self.folder, name, self.connection.config.timeout_seconds, self.stopping)
        if read != list(ids) or states_TAE.shape[:2] != (len(ids), len(self.taps)):
            found = f"states of shape {tuple(states_TAE.shape)} for a text of {len(ids)} tokens"
            raise InputError(f"{where} gives {found}, and its name promises {len(self.taps)} taps of each; {START}")
        return ServedStates(states_TAE, answer.next_token(where))


class EngineStates:
    """The states of one target by its servers, asked by a thread for each request that they take at a time. To be closed."""

    def __init__(self, config: EngineStatesConfig, target: Target) -> None:
        self.config, self.target = config, target
        self.last, self.norm = num_blocks(target.model), final_norm(target.model)
        self._width = int(target.model.config.get_text_config().hidden_size)
        if not Path(config.path).is_dir() or not os.access(config.path, os.W_OK):  # files are deleted once read
            raise InputError(f"target.states.path: {config.path} is no folder here that can be written to")
        self._servers = [StateServer(config, url) for url in config.urls]
        first = self._servers[0]
        self.taps = first.taps
        self._idle = SimpleQueue[StateServer]()  # each as often as it takes one more
        for server in self._servers:
            if server.taps != self.taps:
                raise InputError(f"{KEY}: {first.url} gives {first.model} and {server.url} {server.model}; start all alike")
        for server in self._servers * config.concurrency:
            self._idle.put(server)
        self._pool = ThreadPoolExecutor(max_workers=self._idle.qsize())
        try:
            self.serve([])
            for server in self._servers:
                self._check(server)
        except BaseException:
            self._shut_down()
            raise
        target.runner.refused = frozenset({"trees"})
        target.runner.forward = ServedForward(target.model, self.of_texts)

    def close(self) -> None:
        self.target.runner.forward = None
        self._shut_down()

    def serve(self, taps: Sequence[int]) -> None:
        """Check that the servers give these taps and the last block's state, from which the final one is made."""
        needed = sorted({*taps, self.last})
        if missing := [tap for tap in needed if tap not in self.taps]:
            given = f"{self.config.urls[0]} gives the states of taps {self.taps}"
            raise InputError(f"{KEY}: {given}, and {needed} are needed: {missing} are missing; {START}")

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches with the answers that `states` waits for, each after the states of the next ones were requested."""
        waiting: deque[Batch] = deque()
        try:
            for batch in batches:
                waiting.append(batch._replace(signals=self._answers(batch)))
                if len(waiting) > self.config.prefetch:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()
        finally:
            for answer in [answer for batch in waiting for answer in self._answers(batch)]:
                answer.cancel()

    def states(self, batch: Batch, taps: Sequence[int] = ()) -> TargetStates:
        """Return the states at every position, on the batch's device and in the target's dtype; 0 on padding."""
        answers, tapped_ABTE = self._answers(batch), list[Tensor]()
        for column in self._columns(taps):
            tap_BTE = torch.zeros(*batch.input_ids_BT.shape, self._width, dtype=self.target.model.dtype)
            for place, answer in zip(documents_of(batch), answers, strict=True):
                tap_BTE[place.row, place.start : place.end] = answer.result().states_TAE[:, column]
            tapped_ABTE.append(upload(tap_BTE, batch.input_ids_BT.device))
        return self._finished(tapped_ABTE)

    def of_each(self, rows: Sequence[Ids], taps: Sequence[int]) -> Iterator[TargetStates]:
        """Yield the states `[1, T, E]` of each text on the target's device; all are requested at once."""
        for answer in [self._ask(row) for row in rows]:
            yield self._placed([answer.result().states_TAE], taps)

    def of_texts(self, rows: Sequence[Sequence[int]], num_last: int, taps: Sequence[int]) -> TargetStates:
        """Return the states of the last `num_last` tokens of each text, on the target's device."""
        answers = [self._ask(row) for row in rows]
        return self._placed([answer.result().states_TAE[-num_last:] for answer in answers], taps)

    def _answers(self, batch: Batch) -> list[Future[ServedStates]]:
        """Return the answers for a batch's texts, which `ahead` has asked for or are asked for now."""
        return batch.signals if isinstance(batch.signals, list) else [self._ask(ids) for ids in texts(batch)]

    def _ask(self, ids: Sequence[int]) -> Future[ServedStates]:
        """Return the states of a text, once a server has given them; its error is an `InputError`."""
        try:
            return self._pool.submit(self._fetch, tuple(ids))
        except RuntimeError as error:  # the pool was shut down
            raise InputError("the servers of hidden states were closed") from error

    def _fetch(self, ids: Ids) -> ServedStates:
        server = self._idle.get()
        try:
            return server.fetch(ids)
        except (GaveUp, NotWritten) as error:
            raise InputError(f"{KEY}: {server.url} failed: {error}; start it again, and run the same command again") from error
        finally:
            self._idle.put(server)

    def _shut_down(self) -> None:
        """Drop what waits, and end the rest: what is under way is finished where it takes seconds, so that no file is left."""
        for server in self._servers:
            server.connection.stop()
        timer = Timer(CLOSING_SECONDS, self._end)
        timer.start()
        self._pool.shutdown(cancel_futures=True)
        timer.cancel()
        self._end()

    def _end(self) -> None:
        for server in self._servers:
            server.stopping.set()
            server.connection.close()

    def _columns(self, taps: Sequence[int]) -> list[int]:
        """Return where these taps, and the last block's state after them, stand in an answer."""
        return [self.taps.index(tap) for tap in (*taps, self.last)]

    def _placed(self, rows_BTAE: list[Tensor], taps: Sequence[int]) -> TargetStates:
        states_BTAE = upload(torch.stack(rows_BTAE).to(self.target.model.dtype), self.target.device)
        return self._finished([states_BTAE[:, :, column] for column in self._columns(taps)])

    @torch.no_grad()
    def _finished(self, tapped_ABTE: Sequence[Tensor]) -> TargetStates:
        *taps_ABTE, last_BTE = tapped_ABTE
        with torch.autocast(last_BTE.device.type, enabled=False):
            return TargetStates(final_BTE=self.norm(last_BTE), taps_ABTE=tuple(taps_ABTE))

    @torch.no_grad()
    def _check(self, server: StateServer) -> None:
        """Refuse a server that runs another target: on a probe, the distribution that it names must be what norm and head here
        make of its last state, and its states those of the target here, where the blocks are here too.
        """
        model, where = self.target.model, f"{KEY}: {server.url} does not serve target {self.target.identity.name}"
        ids_1T = probe_ids(model)
        answer = server.fetch(ids_1T[0].tolist(), with_next=True)
        if (width := answer.states_TAE.shape[-1]) != self._width:
            raise InputError(f"{where}: its states are {width} wide, and the target's {self._width}")
        found = self._placed([answer.states_TAE], self.taps)
        log_p_V = head_logits(model, found.final_BTE[0, -1]).float().log_softmax(-1)
        known = dict(enumerate(log_p_V.tolist()))
        gaps = [abs(known.get(token, -math.inf) - log_p) for token, log_p in answer.next_token.items()]
        tolerance = self.config.probe_tolerance
        if not gaps or not max(gaps) <= tolerance:  # also where one is no number
            raise InputError(
                f"{where}: the log-probabilities that it gives after a probe differ by {max(gaps, default=math.nan):.3g} nats "
                f"from those of its last state here, and target.states.probe_tolerance allows {tolerance:g}"
            )
        if self.target.spread_by is not None:
            own = read_states(model, ids_1T, self.taps)
            error = max(relative_error(*pair) for pair in zip(found.taps_ABTE, own.taps_ABTE, strict=True))
            # By how much the states of one target may differ in two programs, in a share of their size.
            if not error <= max(rounding(model), 16 * torch.finfo(answer.states_TAE.dtype).eps):
                raise InputError(f"{where}: its states of a probe differ by {error:.3g} of their size from those here")
        logger.info("server %s gives the states of taps %s: on a probe within %.2g nats", server.url, server.taps, max(gaps))


def texts(batch: Batch) -> list[Ids]:
    host = batch.on_host
    return [tuple(host.input_ids_BT[each.row, each.start : each.end].tolist()) for each in documents_of(host)]


def take_states(folder: Path, name: str, timeout_seconds: float, stopping: Event) -> tuple[Tensor, list[int]]:
    """Return what a server wrote into a file, states `[T, A, E]` and the token ids that it read, and delete its files."""
    path = inside(folder, name, "target.states: a server's answer")
    lock = path.with_name(f"{path.name}.lock")
    deadline, wait = time.monotonic() + timeout_seconds, FIRST_WAIT_SECONDS
    try:
        while True:
            problem = "is not written"
            if not _is_held(lock):
                try:
                    tensors = load(path.read_bytes())
                    return tensors["hidden_states"], tensors["token_ids"].tolist()
                except FileNotFoundError:
                    problem = "is not there"
                except (SafetensorError, KeyError):
                    problem = "is not whole"
            if time.monotonic() > deadline or stopping.is_set():
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
    raise NotWritten(
        f"its file {path.name} {problem} in target.states.path {folder}: was it started with that folder, and is its disk full?"
    )


def _is_held(lock: Path) -> bool:
    """Return whether a server holds the lock; there may be none, yet or at all."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False

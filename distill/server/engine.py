"""The target run by servers: its states over batches, requested ahead, and over texts under way, for held-out decoding.

Servers give the residual stream after chosen blocks (taps); that after the last one becomes the final state by the norm here,
and logits by the head here.
B batch, T positions, A taps, E width of the target.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from threading import Lock

import torch
from torch import Tensor

from configs.runtime.errors import InputError
from configs.schema.target import EngineStatesConfig
from distill.dataset.batches import documents_of
from distill.server.states import START, ServedStates, StateServer, StateServers
from heads.device import upload
from heads.frozen.hidden_states import TargetStates, final_norm, num_blocks, read_states
from heads.frozen.loading import Target
from heads.frozen.served import ServedForward
from heads.inference.causal_lm import head_logits
from heads.inference.model_checks import probe_ids, relative_error, rounding
from heads.modules.interface import Batch

logger = logging.getLogger("draftsmith")

Ids = tuple[int, ...]


class EngineStates:
    """The states of one target by its servers. To be closed."""

    def __init__(self, config: EngineStatesConfig, target: Target) -> None:
        self.config, self.target = config, target
        self.last, self.norm = num_blocks(target.model), final_norm(target.model)
        self._width = int(target.model.config.get_text_config().hidden_size)
        self._lock = Lock()
        self._asked: dict[Ids, list[Future[ServedStates]]] = {}
        self.servers = StateServers(config)
        try:
            self.serve([])
            for server in self.servers.servers:
                self._check(server)
        except BaseException:
            self.servers.close()
            raise
        target.runner.refused = frozenset({"trees"})
        target.runner.forward = ServedForward(target.model, self.of_texts)

    def close(self) -> None:
        self.target.runner.forward = None
        self.servers.close()

    def serve(self, taps: Sequence[int]) -> None:
        """Check that the servers give these taps and the last block's state, from which the final one is made."""
        needed = sorted({*taps, self.last})
        if missing := [tap for tap in needed if tap not in self.servers.taps]:
            raise InputError(
                f"target.states.urls: {self.config.urls[0]} gives the states of taps {self.servers.taps}, and {needed} are "
                f"needed: {missing} are missing; {START}"
            )

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches, each after the states of the next ones were requested."""
        waiting: deque[Batch] = deque()
        try:
            for batch in batches:
                for ids in texts(batch):
                    answer = self.servers.ask(ids)
                    with self._lock:
                        self._asked.setdefault(ids, []).append(answer)
                waiting.append(batch)
                if len(waiting) > self.config.prefetch:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()
        finally:
            for answer in [self._take(ids) for batch in waiting for ids in texts(batch)]:
                answer.cancel()

    def states(self, batch: Batch, taps: Sequence[int] = ()) -> TargetStates:
        """Return the states at every position, on the batch's device and in the target's dtype; 0 on padding."""
        answers = [self._take(ids) for ids in texts(batch)]
        tapped_ABTE: list[Tensor] = []
        for column in self._columns(taps):
            tap_BTE = torch.zeros(*batch.input_ids_BT.shape, self._width, dtype=self.target.model.dtype)
            for place, answer in zip(documents_of(batch), answers, strict=True):
                tap_BTE[place.row, place.start : place.end] = answer.result().states_TAE[:, column]
            tapped_ABTE.append(upload(tap_BTE, batch.input_ids_BT.device))
        return self._finished(tapped_ABTE)

    def of_each(self, rows: Sequence[Ids], taps: Sequence[int]) -> Iterator[TargetStates]:
        """Yield the states `[1, T, E]` of each text on the target's device; all are requested at once."""
        for answer in [self.servers.ask(row) for row in rows]:
            yield self._placed([answer.result().states_TAE], taps)

    def of_texts(self, rows: Sequence[Sequence[int]], num_last: int, taps: Sequence[int]) -> TargetStates:
        """Return the states of the last `num_last` tokens of each text, on the target's device."""
        answers = [self.servers.ask(row) for row in rows]
        return self._placed([answer.result().states_TAE[-num_last:] for answer in answers], taps)

    def _take(self, ids: Ids) -> Future[ServedStates]:
        """Return what was asked before, once, or is asked now."""
        with self._lock:
            answers = self._asked.get(ids, [])
            answer = answers.pop(0) if answers else None
            if not answers:
                self._asked.pop(ids, None)
        return self.servers.ask(ids) if answer is None else answer

    def _columns(self, taps: Sequence[int]) -> list[int]:
        """Return where these taps, and the last block's state after them, stand in an answer."""
        return [self.servers.taps.index(tap) for tap in (*taps, self.last)]

    def _placed(self, rows_BTAE: list[Tensor], taps: Sequence[int]) -> TargetStates:
        states_BTAE = upload(torch.stack(rows_BTAE).to(self.target.model.dtype), self.target.device)
        return self._finished([states_BTAE[:, :, column] for column in self._columns(taps)])

    @torch.no_grad()
    def _finished(self, tapped_ABTE: Sequence[Tensor]) -> TargetStates:
        """Make the final state of the last block's, which stands last."""
        *taps_ABTE, last_BTE = tapped_ABTE
        with torch.autocast(last_BTE.device.type, enabled=False):
            return TargetStates(final_BTE=self.norm(last_BTE), taps_ABTE=tuple(taps_ABTE))

    @torch.no_grad()
    def _check(self, server: StateServer) -> None:
        """Refuse a server that runs another target: on a probe, the distribution that it names must be what norm and head here
        make of its last state, and its states those of the target here, where the blocks are here too.
        """
        model, where = self.target.model, f"target.states.urls: {server.url} does not serve target {self.target.identity.name}"
        ids_1T = probe_ids(model)
        answer = server.fetch(ids_1T[0].tolist(), with_next=True)
        if (width := answer.states_TAE.shape[-1]) != self._width:
            raise InputError(f"{where}: its states are {width} wide, and the target's {self._width}")
        found = self._placed([answer.states_TAE], self.servers.taps)
        log_p_V = head_logits(model, found.final_BTE[0, -1]).float().log_softmax(-1)
        known = dict(enumerate(log_p_V.tolist()))
        gaps = [abs(known.get(token, -math.inf) - log_p) for token, log_p in answer.next_token.items()]
        tolerance = self.config.probe_tolerance
        if not gaps or not max(gaps) <= tolerance:  # also where one is no number
            raise InputError(
                f"{where}: the log-probabilities that it gives after a probe differ by {max(gaps, default=float('nan')):.3g} "
                "nats from those that norm and head here make of its last state, and target.states.probe_tolerance allows "
                f"{tolerance:g}"
            )
        compared = f"log-probabilities within {max(gaps):.2g} nats"
        if self.target.spread_by is not None:
            own = read_states(model, ids_1T, self.servers.taps)
            errors = [relative_error(*pair) for pair in zip(found.taps_ABTE, own.taps_ABTE, strict=True)]
            # By how much the states of one target may differ in two programs, in a share of their size.
            if not max(errors) <= max(rounding(model), 16 * torch.finfo(answer.states_TAE.dtype).eps):
                raise InputError(f"{where}: its states of a probe differ by {max(errors):.3g} of their size from those here")
            compared += f", states within {max(errors):.2g} of their size"
        dtype = str(answer.states_TAE.dtype).removeprefix("torch.")
        logger.info("server %s gives the states of taps %s in %s: on a probe %s", server.url, server.taps, dtype, compared)


def texts(batch: Batch) -> list[Ids]:
    """Return the token ids of each document in a batch."""
    host = batch.on_host
    return [tuple(host.input_ids_BT[each.row, each.start : each.end].tolist()) for each in documents_of(host)]

"""The target's side of the loss of a batch: computed here, by servers of hidden states, or read from a cache.

The training loop asks the source once a batch, and hands what it gets to the task's loss. A cache is read by the
loader, in a thread ahead of the loop. B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from distill.cache.reader import TargetCache
from heads.device import upload
from heads.frozen.hidden_states import TargetStates, read_states
from heads.frozen.loading import Target
from heads.modules.interface import Batch, Normalisers


@dataclass(frozen=True)
class TargetSignals:
    """What a loss takes of the target over a batch; it never carries gradients."""

    states: TargetStates  # at every position
    normalisers: Normalisers | None = None  # of the logits at every position, where a cache keeps them and the loss takes them

    def to(self, device: torch.device) -> TargetSignals:
        """Return the signals on a device; the host does not wait for the copy."""
        known = self.normalisers
        if known is not None:
            known = Normalisers(log_sum_P=upload(known.log_sum_P, device), top1_P=upload(known.top1_P, device))
        return TargetSignals(self.states.map(lambda states_BTE: upload(states_BTE, device)), known)


@dataclass(frozen=True)
class SignalSource:
    """Where the signals of a run come from."""

    target: Target
    taps: Sequence[int] = ()  # states that are read beside the final ones
    cache: TargetCache | None = None  # of the batches' conversations; None: the target runs, or its servers do
    _: KW_ONLY
    known_ahead: bool = True  # batches are read as they were loaded, and not changed by the draft before
    normalised: bool = False  # the loss takes the normalisers that a cache keeps at every position

    @property
    def num_parameters(self) -> int:
        """Parameters of the target that run here on every batch."""
        is_elsewhere = self.cache is not None or self.target.states_from is not None
        return 0 if is_elsewhere else sum(each.numel() for each in self.target.model.parameters())

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches as they come, each after signals of the next ones were requested."""
        if self.cache is not None:
            return _one_ahead(batches)
        servers = self.target.states_from if self.known_ahead else None
        return batches if servers is None else servers.ahead(batches)

    @torch.no_grad()
    def read(self, batch: Batch) -> TargetSignals:
        """Return the signals of a batch, on its device; `InputError` where they are not to be had."""
        if isinstance(batch.signals, TargetSignals):
            return batch.signals.to(batch.input_ids_BT.device)
        if self.cache is not None:
            return self._read_cache(batch)
        if self.target.states_from is not None:
            return TargetSignals(self.target.states_from.states(batch, self.taps))

        media = batch.media_inputs(self.target)
        return TargetSignals(read_states(self.target.model, batch.input_ids_BT, self.taps, batch.packed_positions_BT, media))

    def _read_cache(self, batch: Batch) -> TargetSignals:
        assert self.cache is not None
        return TargetSignals(self.cache.states(batch, self.taps), self.cache.normalisers(batch) if self.normalised else None)

    def loading(self, loader: DataLoader[Batch]) -> DataLoader[Batch]:
        """Return the loader, whose batches come with their signals of the cache, if there is one."""
        if self.cache is not None:
            collate = loader.collate_fn

            def with_signals(rows: list[Any]) -> Batch:
                batch = collate(rows)
                return batch._replace(signals=self._read_cache(batch))

            loader.collate_fn = with_signals
        return loader


def _one_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = thread.submit(next, batches, None)
            yield batch

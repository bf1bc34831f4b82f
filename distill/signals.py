"""The target's side of the loss of a batch: computed here, by servers of hidden states, or read from a cache.

`signal_source` chooses; the training loop asks the source once a batch, and hands what it gets to the task's loss. Where
signals come from a disk or a server, a thread may read the next batch's during a step (`reads_ahead`). `num_parameters` of the
target run here on every batch. `ahead` yields batches, each after signals of the next ones were requested.
B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distill.cache.reader import TargetCache
from distill.loss.pairs import SparseTarget
from heads.frozen.hidden_states import TargetStates, read_states
from heads.frozen.loading import StateSource, Target
from heads.frozen.processes import in_turns
from heads.modules.interface import Batch, Normalisers


class TargetSignals(NamedTuple):
    """What a loss takes of the target over a batch, on the batch's device; it never carries gradients."""

    # Hidden states at every position, from a cache for a draft LM at those before labels alone; or a sparse target of the
    # positions before labels, from a top-k cache.
    states: TargetStates | SparseTarget
    normalisers: Normalisers | None = None  # of the logits at every position, where a cache keeps them

    @property
    def dense(self) -> TargetStates:
        """The hidden states, which all sources but a top-k cache give."""
        assert isinstance(self.states, TargetStates)
        return self.states


@dataclass(frozen=True)
class ComputedSignals:
    """Signals from a forward of the target here, each document's as if it stood alone."""

    target: Target
    taps: tuple[int, ...]
    own_batches: bool = False
    reads_ahead = False

    @property
    def num_parameters(self) -> int:
        return sum(each.numel() for each in self.target.model.parameters())

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return batches

    @torch.no_grad()
    def read(self, batch: Batch) -> TargetSignals:
        def states(ids_BT: Tensor, packed_positions_BT: Tensor | None) -> TargetStates:
            return read_states(self.target.model, ids_BT, self.taps, packed_positions_BT, batch.media_inputs(self.target))

        group = self.target.group if self.own_batches else None
        return TargetSignals(in_turns(group, batch.input_ids_BT, batch.packed_positions_BT, states))


@dataclass(frozen=True)
class ServedSignals:
    """Signals from servers that run the target."""

    servers: StateSource
    taps: tuple[int, ...]
    reads_ahead: bool = True
    num_parameters = 0

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return self.servers.ahead(batches) if self.reads_ahead else batches

    def read(self, batch: Batch) -> TargetSignals:
        return TargetSignals(self.servers.states(batch, self.taps))


@dataclass(frozen=True)
class CachedSignals:
    """Signals from a target cache: hidden states, with normalisers where it keeps them, or the most likely tokens."""

    cache: TargetCache
    taps: tuple[int, ...]
    normalised: bool
    reads_ahead = True
    num_parameters = 0

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return batches

    def read(self, batch: Batch) -> TargetSignals:
        if self.cache.manifest.layout.every_position:
            normalisers = self.cache.normalisers(batch) if self.normalised else None
            return TargetSignals(self.cache.states(batch, self.taps), normalisers)
        signal = self.cache.signal(batch)
        return TargetSignals(signal if isinstance(signal, SparseTarget) else TargetStates(final_BTE=signal))


SignalSource = ComputedSignals | ServedSignals | CachedSignals


def signal_source(
    target: Target,
    taps: Sequence[int] = (),
    cache: TargetCache | None = None,
    *,
    own_batches: bool = False,
    known_ahead: bool = True,
    normalised: bool = False,
) -> SignalSource:
    """Return the source of a run's signals.

    Args:
        taps: states that are read beside the final ones.
        cache: of the target's outputs on the conversations of the batches; None: the target runs, or its servers do.
        own_batches: processes that share the target each bring a batch of their own, not all the same (`heads.frozen.split`).
        known_ahead: batches are read as they were loaded, and not changed by the draft before.
        normalised: the loss takes the normalisers that a cache keeps at every position.
    """
    if cache is not None:
        return CachedSignals(cache, tuple(taps), normalised)
    if target.states_from is not None:
        return ServedSignals(target.states_from, tuple(taps), reads_ahead=known_ahead)
    return ComputedSignals(target, tuple(taps), own_batches=own_batches)

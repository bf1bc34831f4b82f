"""The target's side of the loss of a batch: computed here, by servers of hidden states, or read from a cache.

The training loop asks the source once a batch, and hands what it gets to the task's loss. B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch

from distill.cache.reader import TargetCache
from heads.frozen.hidden_states import TargetStates, read_states
from heads.frozen.loading import Target
from heads.modules.interface import Batch, Normalisers


class TargetSignals(NamedTuple):
    """What a loss takes of the target over a batch, on the batch's device; it never carries gradients."""

    states: TargetStates  # at every position
    normalisers: Normalisers | None = None  # of the logits at every position, where a cache keeps them and the loss takes them


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
    def reads_ahead(self) -> bool:
        """Whether signals come from a disk or a server, so that a thread may read the next batch's during a step."""
        return self.cache is not None or (self.target.states_from is not None and self.known_ahead)

    @property
    def num_parameters(self) -> int:
        """Parameters of the target that run here on every batch."""
        is_elsewhere = self.cache is not None or self.target.states_from is not None
        return 0 if is_elsewhere else sum(each.numel() for each in self.target.model.parameters())

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches as they come, each after signals of the next ones were requested."""
        servers = self.target.states_from if self.cache is None and self.known_ahead else None
        return batches if servers is None else servers.ahead(batches)

    @torch.no_grad()
    def read(self, batch: Batch) -> TargetSignals:
        """Return the signals of a batch; `InputError` where they are not to be had."""
        if self.cache is not None:
            normalisers = self.cache.normalisers(batch) if self.normalised else None
            return TargetSignals(self.cache.states(batch, self.taps), normalisers)
        if self.target.states_from is not None:
            return TargetSignals(self.target.states_from.states(batch, self.taps))

        media = batch.media_inputs(self.target)
        return TargetSignals(read_states(self.target.model, batch.input_ids_BT, self.taps, batch.packed_positions_BT, media))

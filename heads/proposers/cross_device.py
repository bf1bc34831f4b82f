"""A draft on another device than the target.

A round takes two transfers, whatever the number of drafts: the tokens to read, and the proposal. Random numbers are functions
of counters, the same on either device. For drafts that read tokens only: heads share the target's embedding and output head.
**Not run on two accelerators yet.** Left out: drafting ahead while the target verifies (PEARL).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from configs.schema.decoding import SamplingConfig
from heads.frozen.hidden_states import TargetStates
from heads.proposers.protocol import CachesDrafts, Proposal, Tokens, TreeProposer
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.token_tree import DynamicTreeSpec, Tree


class CrossDeviceProposer:
    """A proposer (`heads.proposers.protocol.TreeProposer`) that runs another on that one's device.

    Args:
        draft: reads tokens only, and is on `device`.
    """

    taps: Sequence[int] = ()

    def __init__(self, draft: TreeProposer, device: torch.device, home: torch.device) -> None:
        self.draft, self.device, self.home = draft, device, home
        self.num_trees = draft.num_trees

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self.draft.start(tokens, capacity, states)  # which it does not read, so they are not moved

    def propose(
        self, tokens: Tokens, num_tokens: int, sampling: SamplingConfig, rng: CounterRNG, *, keep_logits: bool
    ) -> Proposal:
        there = self._there(rng)
        return self._home(self.draft.propose(tokens, num_tokens, sampling, there, keep_logits=keep_logits))

    def propose_tree(
        self, tokens: Tokens, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None, rng: CounterRNG
    ) -> Proposal:
        return self._home(self.draft.propose_tree(tokens, tree, drawn_by, self._there(rng)))

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        self.draft.commit(num_accepted, states)

    def discard_drafts(self, rows: Sequence[int]) -> None:
        if isinstance(self.draft, CachesDrafts):
            self.draft.discard_drafts(rows)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.draft.keep_rows(rows)

    def _there(self, rng: CounterRNG) -> CounterRNG:
        """Return the same random numbers for the draft's device."""
        there = CounterRNG(rng.seed, (), self.device)
        there.requests_B = transfer(rng.requests_B, self.device)
        return there

    def _home(self, proposal: Proposal) -> Proposal:
        """Return a proposal with all its tensors on the decoder's device."""
        values: dict[str, Any] = {field.name: getattr(proposal, field.name) for field in fields(proposal)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return Proposal(**values | {name: transfer(tensor, self.home) for name, tensor in tensors.items()})


def transfer(values: Tensor, device: torch.device) -> Tensor:
    """Move a tensor between the two devices; nothing else does."""
    return values.to(device)

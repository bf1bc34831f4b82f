"""A draft on another device than the target: what the decoder asks goes over to it, and its proposal comes back.

A round takes two crossings, whatever the number of drafts: the tokens to read go over (from the host, in the forward's own
transfer), and the proposal comes back, with the distributions where drafts are sampled. Random numbers are functions of
counters (`heads.sampling.counter_rng`), so that they are computed where they are needed and are the same there.

For drafts that read tokens only. Heads read the target's states and borrow its embedding and output head, and live where it
does. **Not run on two devices yet**: the machines this was written on have one each. What was tested is that the proposals are
those of the draft itself with both on the same device, and that every tensor handed on went through `transfer`.
Left out on purpose: drafting ahead while the target verifies (PEARL, arXiv 2408.11850), which two devices would allow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from configs.schema.decoding import SamplingConfig
from heads.proposers.protocol import Proposal, Tokens, TreeProposer
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.token_tree import DynamicTreeSpec, Tree
from heads.target.hidden_states import TargetStates


class CrossDeviceProposer:
    """A proposer (`heads.proposers.protocol.TreeProposer`) whose work is done on a device of its own.

    Args:
        draft: reads tokens only, and is on `device`.
        device: the draft's.
        home: where the decoder wants the drafts.
    """

    taps: Sequence[int] = ()

    def __init__(self, draft: TreeProposer, device: torch.device, home: torch.device) -> None:
        self.draft, self.device, self.home = draft, device, home
        self.num_trees = draft.num_trees

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self.draft.start(tokens, capacity, states)  # which it does not read, so that they stay where they are

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

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.draft.keep_rows(rows)

    def _there(self, rng: CounterRNG) -> CounterRNG:
        """Return the same random numbers for the draft's device."""
        there = CounterRNG(rng.seed, (), self.device)
        there.requests_B = transfer(rng.requests_B, self.device)
        return there

    def _home(self, proposal: Proposal) -> Proposal:
        """Return a proposal with all that it holds on the target's device."""

        def home(values: Tensor | None) -> Tensor | None:
            return None if values is None else transfer(values, self.home)

        return Proposal(
            tokens_BG=transfer(proposal.tokens_BG, self.home),
            num_drafted=proposal.num_drafted,
            probs_BGV=home(proposal.probs_BGV),
            logits_BGV=home(proposal.logits_BGV),
            parents_BN=home(proposal.parents_BN),
            probs_BKV=home(proposal.probs_BKV),
        )


def transfer(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device: the one place where anything passes between the two."""
    return values.to(device)

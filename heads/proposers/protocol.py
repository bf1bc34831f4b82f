"""The protocol between the decoder and whatever proposes tokens; the decoder knows no draft family by name.

A round: `propose` continues the committed tokens, the target verifies the drafts, `commit` says how many were accepted and what
the target's hidden states were. Lists are on the host, one entry a batch row. Drafts form a chain or a tree
(`heads.sampling.token_tree`). B batch, G drafted tokens, N drafts of a tree, K = N + 1 rows of the target's, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from configs.schema.decoding import SamplingConfig
from heads.device import RowInts, Rows, row_tensor, upload
from heads.frozen.hidden_states import TargetStates
from heads.inference.causal_lm import MediaInputs
from heads.inference.kv_cache import RowCache
from heads.sampling.draws import ChainUniforms, CounterRNG, TextCounts, chain_uniforms
from heads.sampling.token_tree import DynamicTreeSpec, Tree, TreeAttention

Tokens = Sequence[Sequence[int]]  # committed ids by row, on the host: prompt and answer so far, the pending token last


@dataclass(frozen=True, kw_only=True)
class RoundInputs:
    """What a round begins with, made once: lists by which the host plans, tensors with which the device computes."""

    tokens: Tokens
    lengths: RowInts  # of the tokens
    room: RowInts  # how many drafts each row can use
    pending_B1: Tensor  # the last token
    rng: CounterRNG  # of the rows
    uniforms: ChainUniforms | None  # the random numbers of a chain; None: nothing is drawn, or a tree
    counts: TextCounts | None = None  # of the tokens `[B, V]`; None: no token is penalised

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        rng: CounterRNG,
        *,
        room: Sequence[int] | None = None,
        num_drafts: int | None = None,
        counts: TextCounts | None = None,
    ) -> RoundInputs:
        """Make the inputs of a round in one copy to the device of `rng`.

        Args:
            room: by row; None: not needed.
            num_drafts: of a chain that is drawn, at most; None: no random numbers are made.
            counts: of the tokens, on the device of `rng`; None: no token is penalised.
        """
        lengths = [len(row) for row in tokens]
        room = [0] * len(tokens) if room is None else list(room)
        sent = np.array([lengths, room, [row[-1] for row in tokens]], dtype=np.int64).T
        if num_drafts is not None:
            sent = np.concatenate([sent, rng.chain_bits(lengths, num_drafts)], 1)
        sent_BX = upload(torch.from_numpy(sent), rng.device)
        return cls(
            tokens=tokens,
            lengths=RowInts(lengths, sent_BX[:, 0]),
            room=RowInts(room, sent_BX[:, 1]),
            pending_B1=sent_BX[:, 2:3],
            rng=rng,
            uniforms=None if num_drafts is None else chain_uniforms(sent_BX[:, 3:]),
            counts=counts,
        )

    def at(self, device: torch.device) -> RoundInputs:
        """Return the same for a draft on another device."""
        num_drafts = None if self.uniforms is None else self.uniforms.draft_BG.shape[1]
        counts = None if self.counts is None else self.counts.to(device)
        return RoundInputs.of(self.tokens, self.rng.at(device), room=self.room.host, num_drafts=num_drafts, counts=counts)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted tokens and the distribution each was drawn from."""

    tokens_BG: Tensor  # drafted ids; only the first `num_drafted[b]` of row b count
    num_drafted: RowInts  # 0..G
    probs_BGV: Tensor | None = None  # of a chain: what each token was drawn from; None: a point mass on the token
    logits_BGV: Tensor | None = None  # the raw logits of these, where `keep_logits` asked for them and the draft has any
    # Of a tree: the target's row that each draft continues (`heads.sampling.token_tree`), -1 for one that does not count;
    # siblings in the order of their ranks. None: a chain.
    parents_BN: Tensor | None = None
    probs_BKV: Tensor | None = None  # of a tree: what each row's children were drawn from, if it has any; None: deterministic


def deterministic_proposal(drafts: Sequence[Sequence[int]], device: torch.device) -> Proposal:
    """Return a proposal of these ids by row, without distributions."""
    counts = [len(draft) for draft in drafts]
    sent_BX = row_tensor([[count, *draft] for count, draft in zip(counts, drafts, strict=True)], device)
    return Proposal(tokens_BG=sent_BX[:, 1:], num_drafted=RowInts(counts, sent_BX[:, 0]))


class Proposer(Protocol):
    """A draft at work on one batch. One object serves one batch at a time; `start` begins the next."""

    @property
    def taps(self) -> Sequence[int]:
        """The target's hidden states that it reads besides the final one (`heads.frozen.hidden_states`)."""

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        """Read the prompts.

        Args:
            tokens: by row the prompt and the first token, which is pending.
            capacity: the most positions that any row will hold.
            states: the target's at the prompts' positions, `[B, T, ...]`; those of row b end with its prompt.
        """

    def propose(self, inputs: RoundInputs, num_tokens: int, sampling: SamplingConfig, *, keep_logits: bool) -> Proposal:
        """Continue each row by up to `num_tokens` (at least 1) drafts; draws use `inputs.uniforms.draft_BG`."""

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        """Take note of how many drafts each row accepted; the target then added one token of its own.

        Another draft may have made them (`heads.proposers.lookup`); they are in the tokens of the next `propose`.

        Args:
            states: the target's at the once pending token and the drafts, `[B, 1 + G, ...]`; the first 1 + `num_accepted[b]`
                of row b belong to committed tokens.
        """

    def keep_rows(self, rows: Rows) -> None:
        """Drop all rows but these, in this order."""


@runtime_checkable
class LearningProposer(Proposer, Protocol):
    """A draft that learns from finished answers while decoding."""

    def learn(self, answer: Sequence[int]) -> None:
        """Add the tokens of a finished answer to its memory. Must not be called while a batch is being decoded."""


class LooksUp(Proposer):
    """Base of the proposers that copy from texts on the host and read no states."""

    taps: Sequence[int] = ()

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def look_up(self, tokens: Tokens, num_tokens: int) -> list[list[int]]:
        """Return up to `num_tokens` drafts by row, on the host; `propose` returns the same as a proposal."""

    def propose(self, inputs: RoundInputs, num_tokens: int, sampling: SamplingConfig, *, keep_logits: bool) -> Proposal:
        return deterministic_proposal(self.look_up(inputs.tokens, num_tokens), self.device)

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        """Do nothing: the accepted tokens are read from the text in the next round."""


@runtime_checkable
class Overrulable(Proposer, Protocol):
    """A draft that keeps what it has computed of its own drafts."""

    def discard_drafts(self, rows: Sequence[int]) -> None:
        """Forget the last proposal in these rows, in which another's drafts are verified. Comes before that."""


@runtime_checkable
class TargetReader(Proposer, Protocol):
    """A draft made of the target's own blocks, which runs the target for the decoder to reuse what drafting has computed."""

    def forward_states(
        self,
        cache: RowCache,
        ids_BT: Tensor,
        starts: RowInts,
        taps: Sequence[int],
        attention: TreeAttention | None = None,
        media: MediaInputs | None = None,
    ) -> TargetStates:
        """Run the target (`heads.frozen.hidden_states.forward_states`) on the prompts, then on each round's tokens."""


@runtime_checkable
class TreeProposer(Proposer, Protocol):
    """A draft that can also propose trees; `num_trees` is 1, or how many drafts make one together."""

    num_trees: int

    def propose_tree(self, inputs: RoundInputs, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None) -> Proposal:
        """Continue each row by a tree.

        `commit` then gets the number of tokens on the accepted path and the target's states along it, the pending token's
        first. The path need not be one of the proposal's: the target may have verified other drafts in the same tree.

        Args:
            tree: its shape; the proposal is shallower where the draft does not reach as deep.
            drawn_by: draw the children of a token by this distribution, as `tree.candidates` says; None: take the most
                probable. A `DynamicTreeSpec` cannot be drawn: tokens left out for their low probability would be missing from
                the distribution.
        """

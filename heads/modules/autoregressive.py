"""Heads at work: what is kept between rounds, and the drafting of heads that feed back their own last state.

At every position t that the target has read, a `ChainHead` reads the feature made of the target's states there and the
embedding of the token at t + 1, and returns a state from which comes the distribution of the token at t + 2. A chain continues
by feeding that state back in place of the feature, a tree by doing so for each token that is extended. Keys and values made of
fed-back states are overwritten by those made of the target's own as soon as it has read the tokens.
B batch, T positions, F width of a feature, D width of a state, W draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema.decoding import SamplingConfig
from heads.device import RowInts, Rows, row_ints, row_tensor
from heads.frozen.hidden_states import TargetStates
from heads.inference.kv_cache import RowCache
from heads.modules.layers import Rotary
from heads.modules.output_head import HeadModule
from heads.proposers.builders import ChainBuilder, DynamicTreeBuilder, StaticTreeBuilder, TreeSlots, tree_builder
from heads.proposers.protocol import Proposal, RoundInputs, Tokens
from heads.sampling.token_tree import DynamicTreeSpec, Tree, TreeAttention


class PendingFeatures:
    """Features, right-padded, that the head has not read yet: the token after the last is known in the next round only.

    A row's last feature is always that of the position before its pending token.
    """

    def __init__(self, features_BTF: Tensor, counts: Sequence[int]) -> None:
        self._columns = [list(range(count)) for count in counts]  # of those kept, where each row's stand
        self._kept_BSF = features_BTF[:, : max(counts)]

    @property
    def counts(self) -> list[int]:
        return [len(row) for row in self._columns]

    def move_on(self, features_BTF: Tensor, counts: Sequence[int], kept: Sequence[int]) -> None:
        """Take what follows the features held so far, of which the last `kept[b]` of each row stay before it."""
        staying = [row[len(row) - n :] for row, n in zip(self._columns, kept, strict=True)]
        oldest = min((column for row in staying for column in row), default=self._kept_BSF.shape[1])
        stay_BSF = self._kept_BSF[:, oldest:]
        begin = stay_BSF.shape[1]
        self._columns = [
            [*(column - oldest for column in row), *range(begin, begin + new)] for row, new in zip(staying, counts, strict=True)
        ]
        new_BTF = features_BTF[:, : max(counts)]
        self._kept_BSF = torch.cat([stay_BSF, new_BTF], 1) if begin else new_BTF

    def read(self, inputs: RoundInputs) -> Window:
        """Return what a forward reads of the features and of the text."""
        counts, device = self.counts, inputs.pending_B1.device
        read = [[count, *row[len(row) - count :]] for row, count in zip(inputs.tokens, counts, strict=True)]
        if is_ragged := any(row != list(range(len(row))) for row in self._columns):
            read += [[0, *row] for row in self._columns]
        read_BX, B = row_tensor(read, device), len(counts)
        features_BTF = self._kept_BSF[:, : max(counts)]
        if is_ragged:
            features_BTF = self._kept_BSF[torch.arange(B, device=device).unsqueeze(1), read_BX[B:, 1:]]
        counts_B, ends = read_BX[:B, 0], inputs.lengths + (-1)
        first = RowInts([end - count for end, count in zip(ends.host, counts, strict=True)], ends.tensor_B - counts_B)
        return Window(features_BTF=features_BTF, next_BT=read_BX[:B, 1:], first=first, ends=ends, last_B=counts_B - 1)

    def keep_rows(self, rows: RowInts) -> None:
        self._kept_BSF = self._kept_BSF[rows.tensor_B]
        self._columns = [self._columns[row] for row in rows.host]


@dataclass(frozen=True, kw_only=True)
class Window:
    """Pending features, right-padded, as a forward reads them."""

    features_BTF: Tensor
    next_BT: Tensor  # the token after each one's position; 0 on padding
    first: RowInts  # the position of each row's first one
    ends: RowInts  # and that after its last
    last_B: Tensor  # the column of each row's last one

    def last(self, values_BTX: Tensor) -> Tensor:
        """Return each row's value at its last feature, `[B, X]`."""
        return values_BTX[torch.arange(len(self.last_B), device=self.last_B.device), self.last_B]


class FeatureProposer(ABC):
    """A head at work: it keeps keys and values in a cache, and the features of the target's states that it has not read.

    A family says in `draft` how it makes a chain of them, and in `beyond` how far a round may reach beyond the last token.
    """

    module: HeadModule

    def __init__(self, module: HeadModule, device: torch.device, beyond: int = 0) -> None:
        self.module, self.device, self.taps = module, device, module.taps
        self._beyond = beyond
        self._cache: RowCache
        self._pending: PendingFeatures
        self._has_read = False  # the pending features, by a proposal

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self._cache = RowCache(self.module.num_caches, capacity + self._beyond)
        for part in self.module.modules():
            if isinstance(part, Rotary):
                part.keep(capacity + self._beyond, self.module.dtype, self.device)
        self._pending = PendingFeatures(self.module.features(states), [len(row) - 1 for row in tokens])
        self._has_read = False

    def propose(self, inputs: RoundInputs, num_tokens: int, sampling: SamplingConfig, *, keep_logits: bool) -> Proposal:
        longest = self.module.settings.longest_draft
        chain = ChainBuilder(inputs, sampling, self.module.output_head(0).vocabulary, keep_logits=keep_logits)
        self.draft(inputs, chain, num_tokens if longest is None else min(num_tokens, longest))
        self._has_read = True
        return chain.proposal()

    @abstractmethod
    def draft(self, inputs: RoundInputs, chain: ChainBuilder, num_tokens: int) -> None:
        """Add up to `num_tokens` drafts to a chain, having read the pending features."""

    def start_tree(
        self, inputs: RoundInputs, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None
    ) -> StaticTreeBuilder | DynamicTreeBuilder:
        """Return the builder of a tree no deeper than the head drafts."""
        longest = self.module.settings.longest_draft
        tree = tree if longest is None else tree.cut(longest)
        self._has_read = True
        return tree_builder(tree, inputs, drawn_by, self.module.output_head(0).vocabulary)

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        """Take the target's states of a round; where something else had drafted, what was not read stays before them."""
        held = self._pending.counts
        kept = [0] * len(held) if self._has_read else held
        self._pending.move_on(self.module.features(states), [accepted + 1 for accepted in num_accepted], kept)
        self._has_read = False

    def keep_rows(self, rows: Rows) -> None:
        rows = row_ints(rows, self.device)
        self._cache.keep_rows(rows)
        self._pending.keep_rows(rows)

    def _place(self, starts: RowInts, length: int, attention: TreeAttention | None = None) -> Tensor:
        """Place the next forward in the cache; return its positions `[B, length]`."""
        self._cache.place(starts, length, self.device, attention)
        if attention is not None:
            return attention.positions_BT
        first_B1 = starts.tensor_B.unsqueeze(1)
        return first_B1 if length == 1 else first_B1 + torch.arange(length, device=self.device)


class ChainHead(HeadModule):
    """A head that drafts one token after another from its own last state."""

    @abstractmethod
    def read(self, features_BTF: Tensor, ids_BT: Tensor, positions_BT: Tensor, cache: RowCache, depth: int) -> Tensor:
        """Return the states `[B, T, D]` at placed positions, from features and the tokens after them.

        Args:
            features_BTF: made of the target's states at depth 0, states that `read` itself returned afterwards.
            ids_BT: the tokens at `positions_BT + 1`.
            positions_BT: where the features stand in the text. The cache's `place` was called for them.
            cache: keys and values of `num_caches` layers.
            depth: how many drafted tokens lie behind, from 0.
        """

    def to_head(self, states_BD: Tensor, depth: int) -> Tensor:
        """Return what the output head reads of states `[..., D]`."""
        return states_BD

    def draft_logits(self, states_BD: Tensor, depth: int) -> Tensor:
        """Return the logits `[..., W]` of the tokens of a depth."""
        return self.output_head(depth).logits(self.to_head(states_BD, depth))


class FeatureChain(FeatureProposer):
    """A `ChainHead` as a proposer (`heads.proposers.protocol.TreeProposer`)."""

    num_trees = 1
    module: ChainHead

    def draft(self, inputs: RoundInputs, chain: ChainBuilder, num_tokens: int) -> None:
        state_BD, ends = self._first_state(inputs)
        for depth in range(num_tokens):
            drafted_B = chain.add(self.module.draft_logits(state_BD, depth))
            if depth + 1 == num_tokens or chain.finished:
                break
            state_BD = self._read(state_BD.unsqueeze(1), drafted_B.unsqueeze(1), ends + depth, depth + 1)[:, 0]

    def propose_tree(self, inputs: RoundInputs, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None) -> Proposal:
        builder = self.start_tree(inputs, tree, drawn_by)
        state_BD, ends = self._first_state(inputs)
        slots, states_BMD, depth = TreeSlots(ends), state_BD.unsqueeze(1), 0
        while frontier := builder.add(self.module.draft_logits(states_BMD, depth)):
            attention, depth = slots.place(frontier), depth + 1
            states_BMD = frontier.of_origins(states_BMD)
            states_BMD = self._read(states_BMD, frontier.tokens_BM, attention.starts, depth, attention)
        return builder.proposal()

    def _first_state(self, inputs: RoundInputs) -> tuple[Tensor, RowInts]:
        """Read the pending features; return the state `[B, D]` that the first draft comes from, and the positions after it."""
        window = self._pending.read(inputs)
        states_BTD = self._read(window.features_BTF, window.next_BT, window.first, 0)
        return window.last(states_BTD), window.ends

    def _read(
        self,
        features_BTF: Tensor,
        ids_BT: Tensor,
        starts: RowInts,
        depth: int,
        attention: TreeAttention | None = None,
    ) -> Tensor:
        positions_BT = self._place(starts, ids_BT.shape[1], attention)
        return self.module.read(features_BTF, ids_BT, positions_BT, self._cache, depth)

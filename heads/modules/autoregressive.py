"""The decoding side of heads that draft one token after another from their own last state, as a chain or a tree.

At every position t that the target has read, a module reads the feature made of the target's states there and the embedding
of the token at t + 1, and returns a state from which the head makes the distribution of the token at t + 2. A chain continues
by feeding that state back in place of the feature, a tree by doing so for each token that is extended. Keys and values made of
fed-back states are overwritten by those made of the target's own as soon as it has read the tokens.
B batch, T positions, F width of a feature, D width of a state, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from configs.schema.decoding import SamplingConfig
from heads.inference.kv_cache import RowCache
from heads.modules.layers import DraftHead
from heads.proposers.protocol import Proposal, Tokens
from heads.proposers.tree_builder import TreeSlots, tree_builder
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.token_tree import DynamicTreeSpec, Tree, TreeAttention
from heads.target.hidden_states import TargetStates


class PendingFeatures:
    """Features that the head has not read yet: positions `first[b]` to `first[b] + counts[b] - 1` of each row.

    The decoder hands states over when they are known, but the token that goes with the last of them, the target's own, is only
    known in the next round. Until then they are kept here.

    Args:
        features_BTF: right-padded.
        counts: how many of each row are valid.
    """

    def __init__(self, features_BTF: Tensor, counts: Sequence[int]) -> None:
        self.first = [0] * len(counts)
        self.counts = list(counts)
        self.features_BTF = features_BTF[:, : max(counts)]

    def move_on(self, features_BTF: Tensor, counts: Sequence[int], kept: Sequence[int]) -> None:
        """Take what follows the features held so far, of which the last `kept[b]` of each row stay before it."""
        self.first = [end - before for end, before in zip(self.ends, kept, strict=True)]
        if max(kept) > 0:
            old, start_of_new = self.counts, self.features_BTF.shape[1]
            columns = [
                [*range(count - before, count), *range(start_of_new, start_of_new + new)]
                for count, before, new in zip(old, kept, counts, strict=True)
            ]
            counts = [len(row) for row in columns]
            padded = [row + [0] * (max(counts) - len(row)) for row in columns]
            rows_B1 = torch.arange(len(counts), device=features_BTF.device).unsqueeze(1)
            both_BSF = torch.cat([self.features_BTF, features_BTF], 1)
            features_BTF = both_BSF[rows_B1, torch.tensor(padded, device=features_BTF.device)]
        self.counts = list(counts)
        self.features_BTF = features_BTF[:, : max(counts)]

    @property
    def ends(self) -> list[int]:
        """The position after the last one, by row."""
        return [first + count for first, count in zip(self.first, self.counts, strict=True)]

    @property
    def last_B(self) -> Tensor:
        """The column of each row's last feature."""
        return torch.tensor(self.counts, device=self.features_BTF.device) - 1

    def next_tokens(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Return the ids `[B, T]` of the token after each feature's position; 0 on padding."""
        width = self.features_BTF.shape[1]
        rows = [list(row[first + 1 : end + 1]) for row, first, end in zip(tokens, self.first, self.ends, strict=True)]
        padded = [row + [0] * (width - len(row)) for row in rows]
        return torch.tensor(padded, device=self.features_BTF.device)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""
        self.features_BTF = self.features_BTF[torch.tensor(rows, device=self.features_BTF.device)]
        self.counts = [self.counts[row] for row in rows]
        self.first = [self.first[row] for row in rows]


class FeatureModule(Protocol):
    """The module that a `FeatureProposer` drafts with."""

    num_caches: int
    lm_head: DraftHead

    @property
    def taps(self) -> Sequence[int]:
        """Which of the target's hidden states it reads besides the final one."""

    def features(self, states: TargetStates) -> Tensor:
        """Return the features `[B, T, F]` made of the target's states."""


class ChainModule(FeatureModule, Protocol):
    """The module that `FeatureChain` drafts with."""

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


class FeatureProposer:
    """What proposers share that read features of the target's states: a cache, and the features not read yet.

    Args:
        module: the head.
        device: where it is.
        beyond: how many positions a round may reach beyond the last token.
    """

    def __init__(self, module: FeatureModule, device: torch.device, beyond: int = 0) -> None:
        self.module, self.device, self.taps = module, device, module.taps
        self._beyond = beyond
        self._cache: RowCache
        self._pending: PendingFeatures
        self._has_read = False  # the pending features, by a proposal

    @property
    def _read_again(self) -> int:
        """How many features of the last proposal the next one has to read once more."""
        return 0

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self._cache = RowCache(self.module.num_caches, capacity + self._beyond)
        self._pending = PendingFeatures(self.module.features(states), [len(row) - 1 for row in tokens])
        self._has_read = False

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        """Take the target's states of a round; where something else had drafted, what was not read stays before them."""
        held = self._pending.counts
        kept = [min(self._read_again, count) for count in held] if self._has_read else held
        self._pending.move_on(self.module.features(states), [accepted + 1 for accepted in num_accepted], kept)
        self._has_read = False

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._cache.keep_rows(rows)
        self._pending.keep_rows(rows)

    def _place(self, starts: Sequence[int], length: int, attention: TreeAttention | None = None) -> Tensor:
        """Place the next forward in the cache; return its positions `[B, length]`."""
        self._has_read = True
        self._cache.place(starts, length, self.device, attention)
        if attention is not None:
            return attention.positions_BT
        return torch.tensor(starts, device=self.device).unsqueeze(1) + torch.arange(length, device=self.device)


class FeatureChain(FeatureProposer):
    """A feature-fed module as a proposer (`heads.proposers.protocol.TreeProposer`)."""

    num_trees = 1
    module: ChainModule

    def propose(
        self, tokens: Tokens, num_tokens: int, sampling: SamplingConfig, rng: CounterRNG, *, keep_logits: bool
    ) -> Proposal:
        chain = self.head(0).start_chain(tokens, sampling, rng, keep_logits=keep_logits)
        state_BD = self._first_state(tokens)
        for depth in range(num_tokens):
            drafted_B = chain.add(self.head(depth).logits(self.module.to_head(state_BD, depth)))
            if depth + 1 == num_tokens or chain.finished:
                break
            starts = [end + depth for end in self._pending.ends]
            state_BD = self._read(state_BD.unsqueeze(1), drafted_B.unsqueeze(1), starts, depth + 1)[:, 0]
        return chain.proposal()

    def propose_tree(
        self, tokens: Tokens, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None, rng: CounterRNG
    ) -> Proposal:
        head = self.head(0)
        builder = tree_builder(tree, [len(row) for row in tokens], drawn_by, rng, head.target_ids, head.scatter)
        slots = TreeSlots(self._pending.ends, self.device)
        states_BMD, depth = self._first_state(tokens).unsqueeze(1), 0
        while frontier := builder.add(self.head(depth).logits(self.module.to_head(states_BMD, depth))):
            attention, depth = slots.place(frontier), depth + 1
            states_BMD = frontier.of_origins(states_BMD)
            states_BMD = self._read(states_BMD, frontier.tokens_BM, attention.starts, depth, attention)
        return builder.proposal()

    def head(self, depth: int) -> DraftHead:
        """Return the output head for the tokens of a depth, counted from 0; all have the same vocabulary."""
        return self.module.lm_head

    def _first_state(self, tokens: Tokens) -> Tensor:
        """Read the pending features; return the state `[B, D]` that the first draft comes from."""
        pending = self._pending
        states_BTD = self._read(pending.features_BTF, pending.next_tokens(tokens), pending.first, 0)
        return states_BTD[torch.arange(len(tokens), device=self.device), pending.last_B]

    def _read(
        self,
        features_BTF: Tensor,
        ids_BT: Tensor,
        starts: Sequence[int],
        depth: int,
        attention: TreeAttention | None = None,
    ) -> Tensor:
        positions_BT = self._place(starts, ids_BT.shape[1], attention)
        return self.module.read(features_BTF, ids_BT, positions_BT, self._cache, depth)

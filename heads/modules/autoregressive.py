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
from heads.device import RowNumbers, TokenRows, on_device, shifted, token_rows
from heads.frozen.hidden_states import TargetStates
from heads.inference.kv_cache import RowCache
from heads.modules.layers import Rotary
from heads.modules.output_head import HeadModule
from heads.proposers.chain_builder import ChainBuilder
from heads.proposers.protocol import Proposal, Tokens
from heads.proposers.tree_builder import DynamicTreeBuilder, StaticTreeBuilder, TreeSlots, tree_builder
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.token_tree import DynamicTreeSpec, Tree, TreeAttention


class PendingFeatures:
    """Features, right-padded, that the head has not read yet: the token after the last is known in the next round only."""

    def __init__(self, features_BTF: Tensor, counts: Sequence[int]) -> None:
        self._first = [0] * len(counts)
        self._columns = [list(range(count)) for count in counts]  # of those kept, where each row's stand
        self._kept_BSF = features_BTF[:, : max(counts)]

    @property
    def counts(self) -> list[int]:
        return [len(row) for row in self._columns]

    def move_on(self, features_BTF: Tensor, counts: Sequence[int], kept: Sequence[int]) -> None:
        """Take what follows the features held so far, of which the last `kept[b]` of each row stay before it."""
        self._first = [first + len(row) - n for first, row, n in zip(self._first, self._columns, kept, strict=True)]
        staying = [row[len(row) - n :] for row, n in zip(self._columns, kept, strict=True)]
        oldest = min((column for row in staying for column in row), default=self._kept_BSF.shape[1])
        stay_BSF = self._kept_BSF[:, oldest:]
        begin = stay_BSF.shape[1]
        self._columns = [
            [*(column - oldest for column in row), *range(begin, begin + new)] for row, new in zip(staying, counts, strict=True)
        ]
        new_BTF = features_BTF[:, : max(counts)]
        self._kept_BSF = torch.cat([stay_BSF, new_BTF], 1) if begin else new_BTF

    def read(self, text: TokenRows) -> Window:
        """Return what a forward reads of the features and of the text, in one upload."""
        counts, uploads = self.counts, text.uploads
        ends = [first + count for first, count in zip(self._first, counts, strict=True)]
        ids = uploads.rows([row[first + 1 : end + 1] for row, first, end in zip(text, self._first, ends, strict=True)])
        first, ends, sizes = (uploads.numbers(each) for each in (self._first, ends, counts))
        features_BTF = self._kept_BSF[:, : max(counts)]
        if any(row != list(range(len(row))) for row in self._columns):
            columns = uploads.rows(self._columns)
            rows_B1 = torch.arange(len(counts), device=uploads.device).unsqueeze(1)
            features_BTF = self._kept_BSF[rows_B1, columns.tensor]
        return Window(features_BTF=features_BTF, next_BT=ids.tensor, first=first, ends=ends, last_B=sizes.tensor_B - 1)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._kept_BSF = self._kept_BSF[on_device(rows, self._kept_BSF.device)]
        self._columns = [self._columns[row] for row in rows]
        self._first = [self._first[row] for row in rows]


@dataclass(frozen=True, kw_only=True)
class Window:
    """Pending features, right-padded, as a forward reads them."""

    features_BTF: Tensor
    next_BT: Tensor  # the token after each one's position; 0 on padding
    first: RowNumbers  # the position of each row's first one
    ends: RowNumbers  # and that after its last
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
        self._read_again = 0  # features of the last proposal that the next one has to read once more
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

    def propose(
        self, tokens: Tokens, num_tokens: int, sampling: SamplingConfig, rng: CounterRNG, *, keep_logits: bool
    ) -> Proposal:
        text, longest = token_rows(tokens, self.device), self.module.settings.longest_draft
        chain = ChainBuilder(text.lengths, sampling, rng, self.module.output_head(0).vocabulary, keep_logits=keep_logits)
        self.draft(text, chain, num_tokens if longest is None else min(num_tokens, longest))
        self._has_read = True
        return chain.proposal()

    @abstractmethod
    def draft(self, text: TokenRows, chain: ChainBuilder, num_tokens: int) -> None:
        """Add up to `num_tokens` drafts to a chain, having read the pending features."""

    def start_tree(
        self, tokens: Tokens, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None, rng: CounterRNG
    ) -> tuple[TokenRows, StaticTreeBuilder | DynamicTreeBuilder]:
        """Return the text, and the builder of a tree no deeper than the head drafts."""
        text, longest = token_rows(tokens, self.device), self.module.settings.longest_draft
        tree = tree if longest is None else tree.cut(longest)
        self._has_read = True
        return text, tree_builder(tree, text.lengths, drawn_by, rng, self.module.output_head(0).vocabulary)

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
        self._cache.place(starts, length, self.device, attention)
        if attention is not None:
            return attention.positions_BT
        first_B1 = on_device(starts, self.device).unsqueeze(1)
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

    def draft(self, text: TokenRows, chain: ChainBuilder, num_tokens: int) -> None:
        state_BD, ends = self._first_state(text)
        for depth in range(num_tokens):
            drafted_B = chain.add(self.module.draft_logits(state_BD, depth))
            if depth + 1 == num_tokens or chain.finished:
                break
            state_BD = self._read(state_BD.unsqueeze(1), drafted_B.unsqueeze(1), shifted(ends, depth), depth + 1)[:, 0]

    def propose_tree(
        self, tokens: Tokens, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None, rng: CounterRNG
    ) -> Proposal:
        text, builder = self.start_tree(tokens, tree, drawn_by, rng)
        state_BD, ends = self._first_state(text)
        slots, states_BMD, depth = TreeSlots(ends, self.device), state_BD.unsqueeze(1), 0
        while frontier := builder.add(self.module.draft_logits(states_BMD, depth)):
            attention, depth = slots.place(frontier), depth + 1
            states_BMD = frontier.of_origins(states_BMD)
            states_BMD = self._read(states_BMD, frontier.tokens_BM, attention.starts, depth, attention)
        return builder.proposal()

    def _first_state(self, text: TokenRows) -> tuple[Tensor, RowNumbers]:
        """Read the pending features; return the state `[B, D]` that the first draft comes from, and the positions after it."""
        window = self._pending.read(text)
        states_BTD = self._read(window.features_BTF, window.next_BT, window.first, 0)
        return window.last(states_BTD), window.ends

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

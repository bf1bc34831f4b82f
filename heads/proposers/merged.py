"""Several drafts as one: a lookup before a draft in chains, or the trees of all merged into one that holds each path once.

B batch, G drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, SamplingConfig
from heads.device import RowNumbers, TokenRows, on_device, token_rows
from heads.frozen.hidden_states import TargetStates
from heads.proposers.counted import beside
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import SuffixLookup
from heads.proposers.protocol import LearningProposer, LooksUp, Proposal, Proposer, Tokens, TreeProposer, deterministic_proposal
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.token_tree import DynamicTreeSpec, Tree

Nodes = tuple[list[int], list[int]]  # tokens, and the row that each continues
MAX_BEHIND = 64  # tokens that a draft may have left unread; a text that is copied may go on for thousands


class LookupFirst:
    """A lookup and a draft as one proposer of chains (`heads.proposers.protocol.Proposer`).

    A row takes the lookup's drafts where that has found a match, as long as its own settings ask, else the draft's, which
    suffix lookup mixes its counts into (`heads.proposers.counted`). The choice depends on the committed text alone, so each
    round is lossless by the rule that verifies its drafts; a lookup's are a point mass. The draft is run in a round where any
    row needs it. What was committed since it ran last it reads in the forward that drafts, so that a round of the lookup costs
    it nothing; only from `MAX_BEHIND` tokens on is it run to keep up.

    Args:
        num_drafts: that the draft makes a round at most; None: as many as are asked for.
    """

    def __init__(self, lookup: LooksUp, draft: Proposer, *, num_drafts: int | None = None) -> None:
        self.lookup, self.draft, self.num_drafts = lookup, draft, num_drafts
        self.taps = draft.taps
        self._read: list[int] = []  # by row: its tokens when the draft was last run
        self._overruled: list[int] = []  # rows whose drafts of this round were dropped for the lookup's

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self.lookup.start(tokens, capacity, states)
        self.draft.start(tokens, capacity + MAX_BEHIND, states)  # rows that read less are padded beyond their end
        self._read = [len(row) for row in tokens]

    def propose(
        self, tokens: Tokens, num_tokens: int, sampling: SamplingConfig, rng: CounterRNG, *, keep_logits: bool
    ) -> Proposal:
        text = token_rows(tokens, self.lookup.device)
        found = self.lookup.look_up(text, num_tokens)
        by_lookup = self._by_lookup(text, found)
        if all(by_lookup) and self._may_wait(text, num_tokens):
            return replace(deterministic_proposal(found, text.uploads), by_lookup=by_lookup)
        found_ids, found_counts = text.uploads.rows(found), text.uploads.numbers(list(map(len, found)))
        with self._mixing():
            own = self.draft.propose(text, self._at_most(num_tokens), self._own(sampling), rng, keep_logits=keep_logits)
        self._note_read(text, by_lookup)
        return _chosen(found_ids.tensor, found_counts, own, by_lookup)

    def _by_lookup(self, text: TokenRows, found: Sequence[Sequence[int]]) -> RowNumbers:
        """Return which rows take the lookup's drafts; added before the draft reads anything, that goes along to the device."""
        self._overruled = []
        return text.uploads.numbers([bool(drafts) for drafts in found])

    def _may_wait(self, text: TokenRows, num_tokens: int) -> bool:
        """Return whether the draft may leave this round's tokens unread as well."""
        behind = max(len(row) - read for row, read in zip(text, self._read, strict=True))
        return behind + num_tokens < MAX_BEHIND

    def _at_most(self, num_tokens: int) -> int:
        return num_tokens if self.num_drafts is None else min(num_tokens, self.num_drafts)

    def _own(self, sampling: SamplingConfig) -> SamplingConfig:
        """Return the draft's settings: a rule that ends chains early knows the times of as many drafts as it makes."""
        if not isinstance(sampling, DecodeConfig):
            return sampling
        return sampling.model_copy(update={"num_speculative_tokens": self._at_most(sampling.num_speculative_tokens)})

    def _mixing(self) -> AbstractContextManager[None]:
        return beside(self.lookup.counted()) if isinstance(self.lookup, SuffixLookup) else nullcontext()

    def _note_read(self, text: TokenRows, by_lookup: Sequence[int]) -> None:
        self._read = [len(row) for row in text]
        self._overruled = [row for row, is_found in enumerate(by_lookup) if is_found]

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        if self._overruled and isinstance(self.draft, DraftLM):
            self.draft.discard_drafts(self._overruled)
        for each in (self.lookup, self.draft):
            each.commit(num_accepted, states)

    def keep_rows(self, rows: Sequence[int]) -> None:
        for each in (self.lookup, self.draft):
            each.keep_rows(rows)
        self._read = [self._read[row] for row in rows]

    def learn(self, answer: Sequence[int]) -> None:
        """See `heads.proposers.protocol.LearningProposer`."""
        if isinstance(self.lookup, LearningProposer):
            self.lookup.learn(answer)


class LookupFirstTrees(LookupFirst):
    """The same for a draft that proposes trees (`heads.proposers.protocol.TreeProposer`); a lookup's drafts are a chain.

    Where trees are drawn, every round is the draft's: a lookup's tokens are not drawn.

    Args:
        num_looked_up: drafts of the lookup's chains of trees at most, which may be deeper than the trees; None: as deep.
    """

    num_trees = 1
    draft: TreeProposer

    def __init__(
        self, lookup: LooksUp, draft: TreeProposer, *, num_drafts: int | None = None, num_looked_up: int | None = None
    ) -> None:
        super().__init__(lookup, draft, num_drafts=num_drafts)
        self.num_looked_up = num_looked_up

    def propose_tree(
        self, tokens: Tokens, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None, rng: CounterRNG
    ) -> Proposal:
        text = token_rows(tokens, self.lookup.device)
        num_looked_up = self.num_looked_up or tree.depth
        found = self.lookup.look_up(text, num_looked_up)
        if drawn_by is not None:
            found = [[] for _ in found]
        by_lookup = self._by_lookup(text, found)
        if all(by_lookup) and self._may_wait(text, num_looked_up):
            return replace(deterministic_proposal(found, text.uploads), by_lookup=by_lookup)
        with self._mixing():
            own = self.draft.propose_tree(text, tree.cut(self._at_most(tree.depth)), drawn_by, rng)
        self._note_read(text, by_lookup)
        if not any(by_lookup):
            return own
        width = max(own.tokens_BG.shape[1], *map(len, found))
        padding = (0, width - own.tokens_BG.shape[1])
        own_ids = functional.pad(own.tokens_BG, padding)
        own_parents = functional.pad(cast(Tensor, own.parents_BN), padding, value=-1)
        ids = text.uploads.rows([[*row, *[0] * (width - len(row))] for row in found])
        parents = text.uploads.rows([[*range(len(row)), *[-1] * (width - len(row))] for row in found])
        by_lookup_B1 = by_lookup.tensor_B.bool().unsqueeze(1)
        return Proposal(
            tokens_BG=torch.where(by_lookup_B1, ids.tensor, own_ids),
            num_drafted=[len(row) or count for row, count in zip(found, own.num_drafted, strict=True)],
            parents_BN=torch.where(by_lookup_B1, parents.tensor, own_parents),
            by_lookup=by_lookup,
        )


class MergedDrafts:
    """Two or more proposers for one target as one of trees (`heads.proposers.protocol.TreeProposer`).

    Every draft is asked for the requested tree, or for a chain where it has no trees; they are merged on the host, and the
    target verifies all in one forward. Trees are not drawn, since each token would have to be verified by its own draft's
    distribution: at a temperature above 0 they are verified by sample-and-match.
    """

    def __init__(self, drafts: Sequence[Proposer], device: torch.device) -> None:
        self.drafts, self.device = list(drafts), device
        self.taps = sorted({tap for draft in drafts for tap in draft.taps})
        self.num_trees = len(self.drafts)

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        for draft in self.drafts:
            draft.start(tokens, capacity, self._for(draft, states))

    def propose(
        self, tokens: Tokens, num_tokens: int, sampling: SamplingConfig, rng: CounterRNG, *, keep_logits: bool
    ) -> Proposal:
        raise InputError("several drafts make a tree: set tree, for instance to a static one with branching [1, 1, 1]")

    def propose_tree(
        self, tokens: Tokens, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None, rng: CounterRNG
    ) -> Proposal:
        if drawn_by is not None:
            raise InputError("the tokens of several drafts cannot be drawn: set verification to match")
        text = token_rows(tokens, self.device)
        by_row = zip(*(_most_probable(draft, text, tree, rng) for draft in self.drafts), strict=True)
        merged = [merge(nodes) for nodes in by_row]
        ids, parents = text.uploads.rows([row for row, _ in merged]), text.uploads.rows([row for _, row in merged], fill=-1)
        num_drafted = [len(row) for row, _ in merged]
        return Proposal(tokens_BG=ids.tensor, num_drafted=num_drafted, parents_BN=parents.tensor)

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        for draft in self.drafts:
            draft.commit(num_accepted, self._for(draft, states))

    def keep_rows(self, rows: Sequence[int]) -> None:
        for draft in self.drafts:
            draft.keep_rows(rows)

    def learn(self, answer: Sequence[int]) -> None:
        """See `heads.proposers.protocol.LearningProposer`."""
        for draft in self.drafts:
            if isinstance(draft, LearningProposer):
                draft.learn(answer)

    def _for(self, draft: Proposer, states: TargetStates) -> TargetStates:
        taps = tuple(states.taps_ABTE[self.taps.index(tap)] for tap in draft.taps)
        return TargetStates(final_BTE=states.final_BTE, taps_ABTE=taps)


def merge(trees: Sequence[Nodes]) -> Nodes:
    """Return the tree of all paths of the given ones, each once; a parent of -1 leaves out a token and its descendants."""
    tokens: list[int] = []
    parents: list[int] = []
    known: dict[tuple[int, int], int] = {}  # row and the token after it -> that token's row
    for ids, rows_before in trees:
        rows = [0]  # of the merged tree, by row of this one
        for token, before in zip(ids, rows_before, strict=True):
            parent = rows[before] if before >= 0 else -1
            if parent >= 0 and (parent, token) not in known:
                tokens.append(token)
                parents.append(parent)
                known[parent, token] = len(tokens)
            rows.append(known[parent, token] if parent >= 0 else -1)
    return tokens, parents


def _chosen(found_BG: Tensor, found_counts: RowNumbers, own: Proposal, by_lookup: RowNumbers) -> Proposal:
    """Return the proposal that holds the lookup's drafts in the rows that are its, and the draft's own in the others."""
    device, by_lookup_B = own.tokens_BG.device, by_lookup.tensor_B.bool()
    num_drafted = RowNumbers(
        [count if is_found else other for is_found, count, other in zip(by_lookup, found_counts, own.num_drafted, strict=True)],
        device,
        lambda: torch.where(by_lookup_B, found_counts.tensor_B, on_device(own.num_drafted, device)),
    )
    width = max(num_drafted)

    def as_wide(values_BGX: Tensor) -> Tensor:
        padding = (0, 0) * (values_BGX.ndim - 2) + (0, max(0, width - values_BGX.shape[1]))
        return functional.pad(values_BGX, padding)[:, :width]

    def of_draft(values_BGX: Tensor | None) -> Tensor | None:
        if values_BGX is None:
            return None
        return as_wide(values_BGX).masked_fill(by_lookup_B.view(-1, *[1] * (values_BGX.ndim - 1)), 0)

    return Proposal(
        tokens_BG=torch.where(by_lookup_B.unsqueeze(1), as_wide(found_BG), as_wide(own.tokens_BG)),
        num_drafted=num_drafted,
        probs_BGV=of_draft(own.probs_BGV),
        logits_BGV=of_draft(own.logits_BGV),
        estimates_BG=of_draft(own.estimates_BG),
        by_lookup=by_lookup,
    )


def _most_probable(draft: Proposer, tokens: Tokens, tree: Tree | DynamicTreeSpec, rng: CounterRNG) -> list[Nodes]:
    """Return a draft's most probable tokens by row, as a tree where it can propose trees.

    A draft LM proposes a tree even where that is a chain: its cache then allows for another path's being accepted.
    """
    if isinstance(draft, TreeProposer):
        found = draft.propose_tree(tokens, tree, None, rng)
        return [(ids, parents) for ids, parents in torch.stack([found.tokens_BG, cast(Tensor, found.parents_BN)], 1).tolist()]
    if isinstance(draft, LooksUp):
        chains = draft.look_up(tokens, tree.depth)
    else:
        found = draft.propose(tokens, tree.depth, SamplingConfig(), rng, keep_logits=False)
        rows = zip(found.tokens_BG.tolist(), found.num_drafted, strict=True)
        chains = [row[:count] for row, count in rows]
    return [(chain, list(range(len(chain)))) for chain in chains]

"""Several drafts as one: a lookup before a draft in chains, or the trees of all merged into one that holds each path once.

B batch, G drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from configs.runtime.errors import InputError
from configs.schema.decoding import SamplingConfig
from heads.device import token_rows
from heads.frozen.hidden_states import TargetStates
from heads.proposers.draft_lm import DraftLM
from heads.proposers.protocol import LearningProposer, LooksUp, Proposal, Proposer, Tokens, TreeProposer, deterministic_proposal
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.token_tree import DynamicTreeSpec, Tree

Nodes = tuple[list[int], list[int]]  # tokens, and the row that each continues
MAX_BEHIND = 64  # tokens that a draft may have left unread; a text that is copied may go on for thousands


class LookupFirst:
    """A lookup and a draft as one proposer of chains (`heads.proposers.protocol.Proposer`), a round of a row by either.

    A row takes the lookup's drafts where that has any (`SuffixLookup.min_expected`), else the draft's. The choice depends on
    the committed text alone, so each round is lossless by the rule that verifies its drafts; where drafts are drawn, a
    lookup's have a point mass as their distribution. The draft is run in a round where any row needs it. What was committed
    since it ran last it reads in the forward that drafts, so that a round of the lookup costs it nothing; only from
    `MAX_BEHIND` tokens on is it run to keep up. Overlap is not measured: a proposal has no logits.

    Args:
        vocab_size: of the target's logits.
        num_drafts: that the draft makes a round at most; None: as many as are asked for.
    """

    def __init__(self, lookup: LooksUp, draft: Proposer, vocab_size: int, *, num_drafts: int | None = None) -> None:
        self.lookup, self.draft, self.vocab_size, self.num_drafts = lookup, draft, vocab_size, num_drafts
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
        behind = max(len(row) - read for row, read in zip(text, self._read, strict=True))
        self._overruled = []
        if all(found) and behind + num_tokens < MAX_BEHIND:
            proposal = deterministic_proposal(found, text.uploads)
            return proposal if sampling.temperature == 0 else replace(proposal, probs_BGV=self._points(proposal.tokens_BG))
        most = num_tokens if self.num_drafts is None else min(num_tokens, self.num_drafts)
        found_ids, is_found = text.uploads.rows(found), text.uploads.rows([[bool(row)] for row in found])
        own = self.draft.propose(text, most, sampling, rng, keep_logits=False)
        self._read = [len(row) for row in text]
        self._overruled = [number for number, row in enumerate(found) if row]
        return self._chosen(found, found_ids.tensor, is_found.tensor.bool(), own)

    def _chosen(self, found: list[list[int]], found_BG: Tensor, is_found_B1: Tensor, own: Proposal) -> Proposal:
        """Return the lookup's drafts in the rows where it has found some, and the draft's own in the others."""
        num_drafted = [len(row) or count for row, count in zip(found, own.num_drafted, strict=True)]
        width = max(num_drafted)
        found_BG, own_BG = (functional.pad(each, (0, width))[:, :width] for each in (found_BG, own.tokens_BG))
        probs_BGV = None
        if own.probs_BGV is not None:
            missing = self.vocab_size - own.probs_BGV.shape[2]
            own_BGV = functional.pad(own.probs_BGV, (0, missing, 0, width))[:, :width]
            probs_BGV = torch.where(is_found_B1.unsqueeze(2), self._points(found_BG), own_BGV)
        tokens_BG = torch.where(is_found_B1, found_BG, own_BG)
        return Proposal(tokens_BG=tokens_BG, num_drafted=num_drafted, probs_BGV=probs_BGV)

    def _points(self, tokens_BG: Tensor) -> Tensor:
        """Return the distributions `[B, G, V]` of drafts that are certain."""
        points_BGV = torch.zeros(*tokens_BG.shape, self.vocab_size, device=tokens_BG.device)
        return points_BGV.scatter_(-1, tokens_BG.unsqueeze(-1), 1.0)

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

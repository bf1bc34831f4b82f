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
from heads.device import RowInts, Rows, on_host, row_ints, row_tensor
from heads.frozen.hidden_states import TargetStates
from heads.proposers.protocol import (
    LearningProposer,
    LooksUp,
    Overrulable,
    Proposal,
    Proposer,
    RoundInputs,
    TargetReader,
    Tokens,
    TreeProposer,
    deterministic_proposal,
)
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
        if isinstance(draft, TargetReader):
            self.forward_states = draft.forward_states

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self.lookup.start(tokens, capacity, states)
        self.draft.start(tokens, capacity + MAX_BEHIND, states)  # rows that read less are padded beyond their end
        self._read = [len(row) for row in tokens]

    def propose(self, inputs: RoundInputs, num_tokens: int, sampling: SamplingConfig, *, keep_logits: bool) -> Proposal:
        found = self.lookup.look_up(inputs.tokens, num_tokens)
        behind = max(length - read for length, read in zip(inputs.lengths.host, self._read, strict=True))
        if all(found) and behind + num_tokens < MAX_BEHIND:
            proposal = deterministic_proposal(found, self.lookup.device)
            return proposal if sampling.temperature == 0 else replace(proposal, probs_BGV=self._points(proposal.tokens_BG))
        most = num_tokens if self.num_drafts is None else min(num_tokens, self.num_drafts)
        own = self.draft.propose(inputs, most, sampling, keep_logits=False)
        self._read = list(inputs.lengths.host)
        if isinstance(self.draft, Overrulable) and (overruled := [number for number, row in enumerate(found) if row]):
            self.draft.discard_drafts(overruled)
        return self._chosen(deterministic_proposal(found, self.lookup.device), own)

    def _chosen(self, found: Proposal, own: Proposal) -> Proposal:
        """Return the lookup's drafts in the rows where it has found some, and the draft's own in the others."""
        counts_B, own_counts_B = found.num_drafted.tensor_B, own.num_drafted.tensor_B
        num_drafted = RowInts(
            [count or other for count, other in zip(found.num_drafted.host, own.num_drafted.host, strict=True)],
            torch.where(counts_B > 0, counts_B, own_counts_B),
        )
        is_found_B1, width = (counts_B > 0).unsqueeze(1), max(num_drafted.host)
        found_BG, own_BG = (functional.pad(each.tokens_BG, (0, width))[:, :width] for each in (found, own))
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
        for each in (self.lookup, self.draft):
            each.commit(num_accepted, states)

    def keep_rows(self, rows: Rows) -> None:
        for each in (self.lookup, self.draft):
            each.keep_rows(rows)
        self._read = [self._read[row] for row in on_host(rows)]

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
        if any(isinstance(draft, TargetReader) for draft in drafts):
            raise InputError("an early exit, which goes on in the target's own cache, is not merged with other drafts")
        self.drafts, self.device = list(drafts), device
        self.taps = sorted({tap for draft in drafts for tap in draft.taps})
        self.num_trees = len(self.drafts)

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        for draft in self.drafts:
            draft.start(tokens, capacity, self._for(draft, states))

    def propose(self, inputs: RoundInputs, num_tokens: int, sampling: SamplingConfig, *, keep_logits: bool) -> Proposal:
        raise InputError("several drafts make a tree: set tree, for instance to a static one with branching [1, 1, 1]")

    def propose_tree(self, inputs: RoundInputs, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None) -> Proposal:
        if drawn_by is not None:
            raise InputError("the tokens of several drafts cannot be drawn: set verification to match")
        by_row = zip(*(_most_probable(draft, inputs, tree) for draft in self.drafts), strict=True)
        merged = [merge(nodes) for nodes in by_row]
        tokens_BN = row_tensor([row for row, _ in merged], self.device)
        parents_BN = row_tensor([row for _, row in merged], self.device, fill=-1)
        num_drafted = row_ints([len(row) for row, _ in merged], self.device)
        return Proposal(tokens_BG=tokens_BN, num_drafted=num_drafted, parents_BN=parents_BN)

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        for draft in self.drafts:
            draft.commit(num_accepted, self._for(draft, states))

    def keep_rows(self, rows: Rows) -> None:
        for draft in self.drafts:
            draft.keep_rows(rows)

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


def _most_probable(draft: Proposer, inputs: RoundInputs, tree: Tree | DynamicTreeSpec) -> list[Nodes]:
    """Return a draft's most probable tokens by row, as a tree where it can propose trees.

    A draft LM proposes a tree even where that is a chain: its cache then allows for another path's being accepted.
    """
    if isinstance(draft, TreeProposer):
        found = draft.propose_tree(inputs, tree, None)
        return [(ids, parents) for ids, parents in torch.stack([found.tokens_BG, cast(Tensor, found.parents_BN)], 1).tolist()]
    found = draft.propose(inputs, tree.depth, SamplingConfig(), keep_logits=False)
    rows = zip(found.tokens_BG.tolist(), found.num_drafted.host, strict=True)
    return [(row[:count], list(range(count))) for row, count in rows]

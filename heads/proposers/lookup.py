"""Drafts copied from texts that were seen before, and several drafts as one.

Lookups need no model and no training; they are baselines for trained drafts, and draft before them. `PromptLookup` continues
the latest occurrence of the last few tokens in the same text (A. Saxena, 2023). `SuffixLookup` drafts by what followed every
suffix of the text, there and in earlier answers (`heads.proposers.suffixes`). `LookupFirst` is a lookup before a draft in
chains, `MergedDrafts` the trees of several drafts merged into one that holds each path once.
B batch, G drafts, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle, islice
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
from heads.proposers.suffixes import SuffixText, automaton_of
from heads.sampling.token_tree import DynamicTreeSpec, Tree

MEMORY_TOKENS = 100_000  # of answers that were learnt, the newest
Nodes = tuple[list[int], list[int]]  # tokens, and the row that each continues
MAX_BEHIND = 64  # tokens that a draft may have left unread; a text that is copied may go on for thousands


class PromptLookup(LooksUp):
    """Prompt lookup as a proposer: the longest match wins, of `longest` down to `shortest` tokens, the latest among equals."""

    def __init__(self, device: torch.device, longest: int = 3, shortest: int = 1) -> None:
        super().__init__(device)
        self.longest, self.shortest = longest, shortest
        self._indices: list[dict[tuple[int, ...], int]] = []  # by row: n-gram -> position after its latest occurrence
        self._indexed: list[int] = []  # by row: positions whose n-grams are in the index

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self._indices = [{} for _ in tokens]
        self._indexed = [0] * len(tokens)

    def look_up(self, tokens: Tokens, num_tokens: int) -> list[list[int]]:
        return [self._continue(row, number, num_tokens) for number, row in enumerate(tokens)]

    def keep_rows(self, rows: Rows) -> None:
        kept = on_host(rows)
        self._indices = [self._indices[row] for row in kept]
        self._indexed = [self._indexed[row] for row in kept]

    def _continue(self, row: Sequence[int], number: int, num_tokens: int) -> list[int]:
        index = self._indices[number]
        # The n-grams that end with the last token have no successor yet, so they are left for the next round.
        for end in range(self._indexed[number] + 1, len(row)):
            for size in range(self.shortest, min(self.longest, end) + 1):
                index[tuple(row[end - size : end])] = end
        self._indexed[number] = len(row) - 1
        for size in range(min(self.longest, len(row)), self.shortest - 1, -1):
            if (found := index.get(tuple(row[len(row) - size :]))) is not None:
                # A match that overlaps itself is a text that repeats: it is copied on from what was copied.
                return list(islice(cycle(row[found : found + num_tokens]), num_tokens))
        return []


class SuffixLookup(LooksUp):
    """Suffix lookup as a proposer (`heads.proposers.protocol.LearningProposer`). The memory is kept from batch to batch.

    Decoding a prompt again copies its answer once `learn` was given that.

    Args:
        answers: token ids of answers that are known from the start, and never forgotten.
        min_expected: the number of drafts that must be expected to be accepted, by their probabilities, for any to be made.
    """

    def __init__(self, device: torch.device, answers: Iterable[Sequence[int]] = (), *, min_expected: float = 0.0) -> None:
        super().__init__(device)
        self.min_expected = min_expected
        self._known = list(answers)
        self._answers: deque[list[int]] = deque()
        self._num_remembered = 0
        self._rows: list[SuffixText] = []
        self._memory = automaton_of(self._known)

    def learn(self, answer: Sequence[int]) -> None:
        """Add the tokens of an answer to the memory. Must not be called while a batch is being decoded."""
        self._answers.append(list(answer))
        self._num_remembered += len(answer)
        if self._num_remembered <= MEMORY_TOKENS:
            self._memory.add(self._answers[-1])
            return
        while self._num_remembered > MEMORY_TOKENS // 2:  # half of them, so that the memory is seldom rebuilt
            self._num_remembered -= len(self._answers.popleft())
        self._memory = automaton_of([*self._known, *self._answers])

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self._rows = [SuffixText(self._memory) for _ in tokens]

    def look_up(self, tokens: Tokens, num_tokens: int) -> list[list[int]]:
        found = []
        for row, text in zip(self._rows, tokens, strict=True):
            row.read(text[row.num_read :])
            drafts, expected = row.drafts(num_tokens)
            found.append(drafts if expected >= self.min_expected else [])
        return found

    def keep_rows(self, rows: Rows) -> None:
        self._rows = [self._rows[row] for row in on_host(rows)]


# --- several drafts as one ---------------------------------------------------------------------------------------------


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
    distribution: at a temperature above 0 they are verified as one-hot.
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
            raise InputError("the tokens of several drafts cannot be drawn: set verification to one_hot")
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

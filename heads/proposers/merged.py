"""Several drafts at once: the trees they propose, merged into one that holds each path once.

Each draft proposes the requested tree, or a chain where it has no trees. The target verifies all of them in one forward, and
`commit` tells every draft the accepted path, whichever had drafted it. Siblings are in the order of the drafts. Trees are not
drawn, since each token would have to be verified by its own draft's distribution: at a temperature above 0 they are verified by
sample-and-match. Merging is done on the host and costs a transfer a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import SamplingConfig
from heads.proposers.protocol import Proposal, Proposer, Tokens, TreeProposer
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.token_tree import DynamicTreeSpec, Tree
from heads.target.hidden_states import TargetStates

Nodes = tuple[list[int], list[int]]  # tokens, and the row that each continues


class MergedDrafts:
    """Several proposers as one (`heads.proposers.protocol.TreeProposer`).

    Args:
        drafts: two or more, for the same target, not used elsewhere.

    Raises:
        InputError: there are fewer than two.
    """

    def __init__(self, drafts: Sequence[Proposer], device: torch.device) -> None:
        if len(drafts) < 2:
            raise InputError(f"merging takes two drafts or more, got {len(drafts)}")
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
        proposals = [_most_probable(draft, tokens, tree, rng) for draft in self.drafts]
        by_row = zip(*map(_nodes, proposals), strict=True)
        merged = [merge(nodes) for nodes in by_row]
        width = max(len(ids) for ids, _ in merged)
        return Proposal(
            tokens_BG=self._padded([ids for ids, _ in merged], width, 0),
            num_drafted=[len(ids) for ids, _ in merged],
            parents_BN=self._padded([parents for _, parents in merged], width, -1),
        )

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        for draft in self.drafts:
            draft.commit(num_accepted, self._for(draft, states))

    def keep_rows(self, rows: Sequence[int]) -> None:
        for draft in self.drafts:
            draft.keep_rows(rows)

    def _for(self, draft: Proposer, states: TargetStates) -> TargetStates:
        taps = tuple(states.taps_ABTE[self.taps.index(tap)] for tap in draft.taps)
        return TargetStates(final_BTE=states.final_BTE, taps_ABTE=taps)

    def _padded(self, rows: Sequence[Sequence[int]], width: int, fill: int) -> torch.Tensor:
        padded = [[*row, *[fill] * (width - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=self.device)


def merge(trees: Sequence[Nodes]) -> Nodes:
    """Return the tree of all paths of the given ones, each once.

    Args:
        trees: tokens and parents (`heads.sampling.token_tree`) of each; a parent of -1 leaves out a token and its descendants.
    """
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


def _most_probable(draft: Proposer, tokens: Tokens, tree: Tree | DynamicTreeSpec, rng: CounterRNG) -> Proposal:
    """Return a draft's most probable tokens, as a tree where it can propose trees.

    A draft LM proposes a tree even where that is a chain: its cache then allows for another path's being accepted.
    """
    if isinstance(draft, TreeProposer):
        return draft.propose_tree(tokens, tree, None, rng)
    return draft.propose(tokens, tree.depth, SamplingConfig(), rng, keep_logits=False)


def _nodes(proposal: Proposal) -> list[Nodes]:
    if proposal.parents_BN is None:
        rows = zip(proposal.tokens_BG.tolist(), proposal.num_drafted, strict=True)
        return [(row[:count], list(range(count))) for row, count in rows]
    return [(ids, parents) for ids, parents in torch.stack([proposal.tokens_BG, proposal.parents_BN], 1).tolist()]

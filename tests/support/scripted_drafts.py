"""A proposer that knows the answers: it drafts some right tokens and then wrong ones, so that every number accepted occurs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from configs.schema.decoding import DecodeConfig, SamplingConfig
from eval.decoder.decode import Request, decode
from eval.decoder.rules import ChainVerification
from eval.decoder.verifier import Verifier
from heads.device import RowInts, Rows
from heads.frozen.hidden_states import TargetStates
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposal, Proposer, RoundInputs, Tokens, deterministic_proposal
from heads.sampling.token_tree import DynamicTreeSpec, Tree


class ScriptedDrafts:
    """Drafts right up to a place that goes round by round from 0 to the end (`heads.proposers.protocol.TreeProposer`)."""

    num_trees = 1
    taps: Sequence[int] = ()

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.texts, self.vocab_size = texts, vocab_size
        self.round = 0

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self.round = 0

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        self.round += 1

    def keep_rows(self, rows: Rows) -> None:
        """Do nothing: texts are found by their prompts."""

    def propose(self, inputs: RoundInputs, num_tokens: int, sampling: SamplingConfig, *, keep_logits: bool) -> Proposal:
        chains = []
        for number, row in enumerate(inputs.tokens):
            right, num_right = self._next(row, num_tokens), (self.round + number) % (num_tokens + 1)
            chains.append([self._wrong(token, 0) if place >= num_right else token for place, token in enumerate(right)])
        return deterministic_proposal(chains, inputs.rng.device)

    def propose_tree(self, inputs: RoundInputs, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None) -> Proposal:
        assert isinstance(tree, Tree)
        rows = [self._tree_row(row, tree, self.round + number) for number, row in enumerate(inputs.tokens)]
        device = inputs.rng.device
        tokens_BN, parents_BN = (torch.tensor(each, device=device) for each in (rows, [tree.parents] * len(rows)))
        num_drafted = RowInts.full(tree.num_nodes, len(rows), device)
        return Proposal(tokens_BG=tokens_BN, num_drafted=num_drafted, parents_BN=parents_BN)

    def _tree_row(self, row: Sequence[int], tree: Tree, turn: int) -> list[int]:
        right, num_right = self._next(row, tree.depth), turn % (tree.depth + 1)
        is_right, drafts = [True], []
        for draft, parent in enumerate(tree.parents):
            depth = tree.depths[draft + 1]
            rank = tree.parents[:draft].count(parent)
            is_turn = rank == (turn + depth) % tree.parents.count(parent)
            is_right.append(is_right[parent] and depth <= num_right and is_turn)
            token = right[depth - 1]
            drafts.append(token if is_right[-1] else self._wrong(token, draft))
        return drafts

    def _next(self, row: Sequence[int], count: int) -> list[int]:
        text = next(text for text in self.texts if list(row[:6]) == list(text[:6]))
        following = [*text[len(row) : len(row) + count]]
        return following + [0] * (count - len(following))

    def _wrong(self, token: int, number: int) -> int:
        return (token + 1 + number) % self.vocab_size


def judged_logits(target: Target, request: Request, config: DecodeConfig, draft: Proposer) -> dict[tuple[int, ...], Tensor]:
    """Decode a request; return the target's logits `[V]` that drafts were held against, by the text before each."""
    seen: list[Tensor] = []
    judge = Verifier.chain

    def note(verifier: Verifier, logits_BKV: Tensor, *others: Any) -> ChainVerification:
        seen.append(logits_BKV[0])
        return judge(verifier, logits_BKV, *others)

    with mock.patch.object(Verifier, "chain", note):
        (generation,), _ = decode(target, [request], config, draft)
    text, found = (*request.tokens, generation.tokens[0]), dict[tuple[int, ...], Tensor]()
    for logits_KV, round_ in zip(seen, generation.rounds, strict=True):
        found |= {(*text, *round_.drafted[:place]): logits_KV[place] for place in range(len(round_.drafted) + 1)}
        text = (*text, *round_.committed)
    return found

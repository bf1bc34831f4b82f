"""The independent draft: a small causal LM with the target's tokenizer, decoding with its own key-value cache.

It may have a reduced vocabulary (`heads.proposers.vocabulary`); its proposals are in the target's ids.

After a fully accepted round its cache lacks the last draft, which it never had to read; the next round's first forward reads
that token and the pending one together, so no round pays an extra forward.
B batch, T tokens, G drafts, V target vocabulary, W the draft's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema.decoding import SamplingConfig
from heads.inference.causal_lm import forward_rows, head_logits, new_cache
from heads.inference.kv_cache import RowCache
from heads.proposers.chain_builder import ChainBuilder
from heads.proposers.protocol import Proposal, Tokens
from heads.proposers.tree_builder import TreeSlots, tree_builder
from heads.proposers.vocabulary import DraftVocabulary
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.token_tree import DynamicTreeSpec, Tree
from heads.target.hidden_states import TargetStates


class DraftLM:
    """A draft model as a proposer (`heads.proposers.protocol.TreeProposer`).

    Args:
        model: a causal LM that reads the target's token ids.
        vocab_size: the target's; extra padded rows of the draft's head are cut off before the softmax. A token that the
            draft has no embedding for (one of the target's padded rows) is read as the draft's last.
        vocabulary: the tokens that the rows of the model's head stand for, after `keep_head_rows`; None: the target's own.
    """

    taps: Sequence[int] = ()
    num_trees = 1

    def __init__(self, model: PreTrainedModel, vocab_size: int, vocabulary: DraftVocabulary | None = None) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.vocabulary = None if vocabulary is None else vocabulary.to(model.device)
        self._last_id = model.config.get_text_config().vocab_size - 1
        self._cache: RowCache
        self._cached: list[int] = []  # positions by row whose keys and values are valid
        self._proposed_from: list[int] = []  # the rows' lengths when they were last continued

    def start(self, tokens: Tokens, capacity: int, states: TargetStates | None = None) -> None:
        self._cache = new_cache(self.model, capacity)
        prompts = [list(row[:-1]) for row in tokens]
        longest = max(map(len, prompts))
        ids_BT = self._ids([row + [0] * (longest - len(row)) for row in prompts])
        forward_rows(self.model, self._cache, ids_BT, [0] * len(prompts))
        self._cached = [len(row) for row in prompts]

    def propose(
        self, tokens: Tokens, num_tokens: int, sampling: SamplingConfig, rng: CounterRNG, *, keep_logits: bool
    ) -> Proposal:
        lengths = [len(row) for row in tokens]
        chain = ChainBuilder(
            lengths, sampling, rng, self.model.device, self._target_ids, self._scatter, keep_logits=keep_logits
        )
        ids_BT, starts = self._uncached(tokens)
        for step in range(num_tokens):
            hidden_BD = forward_rows(self.model, self._cache, ids_BT, starts)[:, -1]
            drafted_B = chain.add(head_logits(self.model, hidden_BD)[:, : self.vocab_size])
            if chain.finished:
                break
            ids_BT, starts = drafted_B.unsqueeze(1), [length + step for length in lengths]
        self._proposed_from = lengths
        self._cached = [length + step for length in lengths]  # up to the last draft, which was not read
        return chain.proposal()

    def propose_tree(
        self, tokens: Tokens, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None, rng: CounterRNG
    ) -> Proposal:
        lengths = [len(row) for row in tokens]
        builder = tree_builder(tree, lengths, drawn_by, rng, self._target_ids, self._scatter)
        slots = TreeSlots(lengths, self.model.device)
        ids_BT, starts = self._uncached(tokens)
        hidden_BTD = forward_rows(self.model, self._cache, ids_BT, starts)
        last_B = self._tensor([length - start - 1 for length, start in zip(lengths, starts, strict=True)])
        hidden_BMD = hidden_BTD[torch.arange(len(lengths), device=last_B.device), last_B].unsqueeze(1)
        while frontier := builder.add(head_logits(self.model, hidden_BMD)[..., : self.vocab_size]):
            attention = slots.place(frontier)
            hidden_BMD = forward_rows(self.model, self._cache, frontier.tokens_BM, attention.starts, attention)
        # The accepted path is not looked up in the cache: the next round's first forward reads its tokens again, together with
        # the pending one.
        self._proposed_from = self._cached = lengths
        return builder.proposal()

    def commit(self, num_accepted: Sequence[int], states: TargetStates | None = None) -> None:
        valid = (start + accepted for start, accepted in zip(self._proposed_from, num_accepted, strict=True))
        self._cached = [min(cached, limit) for cached, limit in zip(self._cached, valid, strict=True)]

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._cache.keep_rows(rows)
        self._cached = [self._cached[row] for row in rows]
        self._proposed_from = [self._proposed_from[row] for row in rows]

    def _uncached(self, tokens: Tokens) -> tuple[Tensor, list[int]]:
        """Return the tokens `[B, T]` that the cache lacks, and the position of each row's first.

        A row of fewer than T tokens is padded at its end, where its drafts overwrite the padding. After a chain there is no
        padding: it leaves at most two tokens uncached, and no row has fewer.
        """
        longest = max(len(row) - cached for row, cached in zip(tokens, self._cached, strict=True))
        # Rows that lag less read a few cached tokens again: the same keys and values at the same places.
        rows = [[*row[-longest:], *[0] * (longest - len(row))] for row in tokens]
        return self._ids(rows), [max(0, len(row) - longest) for row in tokens]

    def _target_ids(self, drafted_B: Tensor) -> Tensor:
        return drafted_B if self.vocabulary is None else self.vocabulary.token_ids_W[drafted_B]

    def _scatter(self, values_BW: Tensor, fill: float) -> Tensor:
        return values_BW if self.vocabulary is None else self.vocabulary.scatter(values_BW, fill)

    def _ids(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return self._tensor(rows).clamp(max=self._last_id)

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, device=self.model.device)

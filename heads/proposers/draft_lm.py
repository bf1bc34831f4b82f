"""The independent draft: a small causal LM with the target's tokenizer, decoding with its own key-value cache.

It may have a reduced vocabulary (`heads.vocabulary`); its proposals are in the target's ids.

After a fully accepted round its cache lacks the last draft, which it never had to read; the next round's first forward reads
that token and the pending one together, so no round pays an extra forward. So it does with what others have drafted.

On another device than the target (`home`) a round takes two transfers, whatever the number of drafts: the tokens to read, and
the proposal. Random numbers are functions of counters, the same on either device. **Not run on two accelerators yet.** Left
out: drafting ahead while the target verifies (PEARL).
B batch, T tokens, G drafts, V target vocabulary, W the draft's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema.decoding import SamplingConfig
from heads.device import RowInts, Rows, row_ints, row_tensor
from heads.frozen.hidden_states import TargetStates
from heads.inference.causal_lm import forward_rows, head_logits, new_cache
from heads.inference.kv_cache import RowCache
from heads.proposers.builders import ChainBuilder, TreeSlots, tree_builder
from heads.proposers.protocol import Proposal, RoundInputs, Tokens
from heads.sampling.token_tree import DynamicTreeSpec, Tree
from heads.vocabulary import DraftVocabulary


class DraftLM:
    """A draft model as a proposer (`heads.proposers.protocol.TreeProposer`), whose cache holds what it has drafted.

    Rows of its head beyond the target's `vocab_size` are cut off before the softmax; a token that it has no embedding for (one
    of the target's padded rows) is read as its last. `vocabulary` are the tokens of a head cut by `keep_head_rows`; `home` is
    the target's device, None: the model's.
    """

    taps: Sequence[int] = ()
    num_trees = 1

    def __init__(
        self,
        model: PreTrainedModel,
        vocab_size: int,
        vocabulary: DraftVocabulary | None = None,
        home: torch.device | None = None,
    ) -> None:
        self.model, self.vocab_size, self.home = model, vocab_size, home
        self.vocabulary = None if vocabulary is None else vocabulary.to(model.device)
        self._last_id = model.config.get_text_config().vocab_size - 1
        self._cache: RowCache
        self._cached: list[int] = []  # positions by row whose keys and values are valid
        self._proposed_from: list[int] = []  # the rows' lengths when they were last continued

    def start(self, tokens: Tokens, capacity: int, states: TargetStates | None = None) -> None:
        self._cache = new_cache(self.model, capacity)
        prompts = [row[:-1] for row in tokens]
        if any(prompts):  # else each is one token, which the first round reads
            ids_BT = row_tensor(prompts, self.model.device).clamp(max=self._last_id)
            forward_rows(self.model, self._cache, ids_BT, [0] * len(prompts))
        self._cached = [len(row) for row in prompts]
        self._proposed_from = list(self._cached)

    def propose(self, inputs: RoundInputs, num_tokens: int, sampling: SamplingConfig, *, keep_logits: bool) -> Proposal:
        inputs = self._there(inputs)
        lengths = inputs.lengths
        chain = ChainBuilder(inputs, sampling, self.vocabulary, keep_logits=keep_logits)
        hidden_BD = self._read_text(inputs)
        for step in range(num_tokens):
            drafted_B = chain.add(head_logits(self.model, hidden_BD)[:, : self.vocab_size])
            if step + 1 == num_tokens or chain.finished:
                break
            hidden_BD = forward_rows(self.model, self._cache, drafted_B.unsqueeze(1), lengths + step)[:, -1]
        self._proposed_from = list(lengths.host)
        self._cached = [length + step for length in lengths.host]  # up to the last draft, which was not read
        return self._at_home(chain.proposal())

    def propose_tree(self, inputs: RoundInputs, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None) -> Proposal:
        inputs = self._there(inputs)
        lengths = inputs.lengths
        if isinstance(tree, DynamicTreeSpec) and self.home is not None:
            tree = replace(tree, max_depths=inputs.room)
        builder = tree_builder(tree, inputs, drawn_by, self.vocabulary)
        slots = TreeSlots(lengths)
        hidden_BMD = self._read_text(inputs).unsqueeze(1)
        while frontier := builder.add(head_logits(self.model, hidden_BMD)[..., : self.vocab_size]):
            attention = slots.place(frontier)
            hidden_BMD = forward_rows(self.model, self._cache, frontier.tokens_BM, attention.starts, attention)
        # The accepted path is not looked up in the cache: the next round's first forward reads it with the pending token.
        self._proposed_from = self._cached = list(lengths.host)
        return self._at_home(builder.proposal())

    def commit(self, num_accepted: Sequence[int], states: TargetStates | None = None) -> None:
        valid = (start + accepted for start, accepted in zip(self._proposed_from, num_accepted, strict=True))
        self._cached = [min(cached, limit) for cached, limit in zip(self._cached, valid, strict=True)]
        self._proposed_from = list(self._cached)  # what another draft proposes next is not in the cache

    def discard_drafts(self, rows: Sequence[int]) -> None:
        """See `heads.proposers.protocol.Overrulable`."""
        for row in rows:
            self._cached[row] = min(self._cached[row], self._proposed_from[row])

    def keep_rows(self, rows: Rows) -> None:
        rows = row_ints(rows, self.model.device)
        self._cache.keep_rows(rows)
        self._cached = [self._cached[row] for row in rows.host]
        self._proposed_from = [self._proposed_from[row] for row in rows.host]

    def _there(self, inputs: RoundInputs) -> RoundInputs:
        """Return the inputs on the model's device."""
        return inputs if self.home is None else inputs.at(self.model.device)

    def _at_home(self, proposal: Proposal) -> Proposal:
        """Return a proposal with all its tensors on the target's device."""
        if self.home is None:
            return proposal
        values = vars(proposal).items()
        moved: dict[str, Any] = {name: value.to(self.home) for name, value in values if isinstance(value, Tensor)}
        return replace(proposal, num_drafted=row_ints(proposal.num_drafted, self.home), **moved)

    def _read_text(self, inputs: RoundInputs) -> Tensor:
        """Read the tokens that the cache lacks; return the state `[B, D]` after each row's last.

        A row that lacks fewer than another is padded at its end, where its drafts overwrite the padding; padding that does not
        fit the cache is read in several forwards. Recurrent states cannot go back so far that tokens are read again.
        """
        lengths, starts = inputs.lengths.host, self._cached
        self._cache.keep_states_from(lengths)
        hidden_BD: Tensor | None = None
        while (longest := max(length - start for length, start in zip(lengths, starts, strict=True))) > 0:
            T = min(longest, self._cache.capacity - max(starts))
            pieces = [row[start : start + T] for row, start in zip(inputs.tokens, starts, strict=True)]
            read = [[len(piece), start, *piece] for piece, start in zip(pieces, starts, strict=True)]
            counts_B, starts_B, ids_BT = row_tensor(read, self.model.device).tensor_split((1, 2), 1)
            counts_B, begun = counts_B[:, 0], RowInts(starts, starts_B[:, 0])
            hidden_BTD = forward_rows(self.model, self._cache, ids_BT.clamp(max=self._last_id), begun)
            last_BD = hidden_BTD[torch.arange(len(pieces), device=counts_B.device), (counts_B - 1).clamp(min=0)]
            hidden_BD = last_BD if hidden_BD is None else torch.where((counts_B > 0).unsqueeze(1), last_BD, hidden_BD)
            starts = [start + len(piece) for start, piece in zip(starts, pieces, strict=True)]
        assert hidden_BD is not None, "the pending token is never in the cache"
        return hidden_BD

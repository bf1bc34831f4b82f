"""The objective of a draft LM: its divergence from the target at the positions before each label of a batch.

B batch, T positions, D width of the draft, E width of the target, N rows that have a label, V vocabulary,
W the draft's vocabulary where it is reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.schema.training import LossConfig
from distill.loss.chunked import ChunkedLoss, LossPart, chunked_losses, rows_of_chunk
from distill.loss.divergences import configured_divergence
from distill.loss.logit_head import LogitHead, model_head
from distill.loss.pairs import HiddenRows, SparseTarget, TargetRows
from heads.device import keeps_small_tensors_near, upload
from heads.frozen.loading import Target
from heads.inference.causal_lm import HeadRows, head_rows, read_documents
from heads.modules.interface import Batch, before_labels, flat
from heads.vocabulary import DraftVocabulary

Timer = Callable[[str], AbstractContextManager[Any]]


class DraftObjective(nn.Module):
    """A draft LM and its loss in one module, so that wrappers (DDP, FSDP, DeepSpeed) see every use of its parameters.

    `timed` takes the name of a part of the step and returns a context manager around it. Without `vocabulary` the draft has all
    of the target's tokens; a head without rows for it is an `InputError`.
    """

    token_ids_W: Tensor | None

    def __init__(
        self,
        draft: PreTrainedModel,
        target: Target,
        config: LossConfig,
        vocabulary: DraftVocabulary | None = None,
        timed: Timer = nullcontext,
    ) -> None:
        super().__init__()
        self.draft, self._timed, self._config = draft, timed, config
        self._divergence = configured_divergence(config)
        self._chunk_size = rows_of_chunk(config.chunk_size, on_cpu=keeps_small_tensors_near(target.device))
        self._shared_vocab_size = min(target.vocab_size, draft.config.get_text_config().vocab_size)
        if vocabulary is not None:  # refuse a head that cannot be reduced now, not in the first step
            head_rows(draft, vocabulary.token_ids_W.to(draft.device))
        # Not saved with the weights, but moved with them.
        self.register_buffer("token_ids_W", None if vocabulary is None else vocabulary.token_ids_W, persistent=False)
        # In a tuple, so that the target does not become a submodule and is neither trained nor saved.
        self._target = (target,)

    def forward(self, batch: Batch, signal: Tensor | SparseTarget, num_labels: Tensor, world_size: int) -> ChunkedLoss:
        """Return the loss over all positions whose next token is a label.

        Args:
            signal: the target's final hidden states `[B, T, E]`, read before labels only, or a sparse target of the N rows
                before labels, in the order of the mask.
            num_labels: labels of the whole optimiser step, over all processes and micro-batches, which the sum is divided by.
            world_size: processes whose gradients are averaged afterwards, which this factor undoes.
        """
        with self._timed("draft"):
            hidden_BTD = read_documents(self.draft, batch.input_ids_BT, batch.packed_positions_BT)
        places_N = upload(before_labels(batch.on_host).flatten().nonzero().squeeze(1), hidden_BTD.device)
        draft_ND = flat(hidden_BTD, places_N)
        labels_N = flat(batch.input_ids_BT, places_N + 1) if "cross_entropy" in self._config.weights else None
        weights_N = torch.full((len(draft_ND),), float(world_size), device=draft_ND.device) / num_labels
        target_rows: TargetRows
        if isinstance(signal, SparseTarget):
            target_rows = signal
        else:
            (target,) = self._target
            logits_of = self._trimmed(model_head(target.model)).logits_of
            target_rows = HiddenRows(hidden_NE=flat(signal, places_N), logits_of=logits_of)
        part = LossPart(
            target=target_rows,
            draft_hidden_ND=draft_ND,
            draft_head=self._draft_head(),
            weights_N=weights_N,
            draft_token_ids_W=self.token_ids_W,
            labels_N=labels_N,
        )
        config = self._config
        return chunked_losses(
            [part],
            self._divergence,
            chunk_size=self._chunk_size,
            temperature=config.temperature,
            compiled=config.compiled,
        )[0]

    def _draft_head(self) -> LogitHead:
        """Return the draft's head: whole, or the rows of a reduced vocabulary, gathered once for all chunks of a batch."""
        if self.token_ids_W is None:
            return self._trimmed(model_head(self.draft))
        rows = HeadRows.of(self.draft, self.token_ids_W)
        return LogitHead(logits_of=rows.logits, parameters=rows.parameters)

    def _trimmed(self, head: LogitHead) -> LogitHead:
        """Return a head without the padded rows that only one of the two models has."""
        return LogitHead(
            logits_of=lambda hidden_ND: head.logits_of(hidden_ND)[..., : self._shared_vocab_size], parameters=head.parameters
        )

"""The objective of a draft LM: its divergence from the target at the positions before each label of a batch.

B batch, T positions, D width of the draft, E width of the target, N rows that have a label, V vocabulary,
W the draft's vocabulary where it is reduced.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.schema.training import LossConfig
from distill.loss.divergences import configured_divergence
from distill.loss.fused import DraftRows, LogitHead, TargetRows, fused_loss, model_head, rows_of_chunk
from heads.device import keeps_small_tensors_near, upload
from heads.frozen.loading import Target
from heads.inference.causal_lm import HeadRows, head_rows, read_documents
from heads.modules.interface import Batch, before_labels, flat
from heads.vocabulary import DraftVocabulary


class DraftLoss(NamedTuple):
    """The sum of the divergence over N rows, to go backward from, and their statistics (`distill.loss.fused.RowStatistics`).

    A tuple, because ZeRO-3 finds the tensors that a module returns, and so the start of its backward, in tuples only.
    """

    loss: Tensor
    values_N: Tensor
    acceptance_N: Tensor
    top1_agrees_N: Tensor


class DraftObjective(nn.Module):
    """A draft LM and its loss in one module, so that wrappers (DDP, FSDP, DeepSpeed) see every use of its parameters.

    Without `vocabulary` the draft has all of the target's tokens; a head without rows for it is an `InputError`.
    """

    token_ids_W: Tensor | None

    def __init__(
        self, draft: PreTrainedModel, target: Target, config: LossConfig, vocabulary: DraftVocabulary | None = None
    ) -> None:
        super().__init__()
        self.draft, self._config = draft, config
        self._divergence = configured_divergence(config)
        self._chunk_size = rows_of_chunk(config.chunk_size, on_cpu=keeps_small_tensors_near(target.device))
        self._shared_vocab_size = min(target.vocab_size, draft.config.get_text_config().vocab_size)
        if vocabulary is not None:  # refuse a head that cannot be reduced now, not in the first step
            head_rows(draft, vocabulary.token_ids_W.to(draft.device))
        # Not saved with the weights, but moved with them.
        self.register_buffer("token_ids_W", None if vocabulary is None else vocabulary.token_ids_W, persistent=False)
        # In a tuple, so that the target does not become a submodule and is neither trained nor saved.
        self._target = (target,)

    def forward(self, batch: Batch, target_BTE: Tensor) -> DraftLoss:
        """Return the sum of the divergence over all positions whose next token is a label.

        Args:
            target_BTE: the target's final hidden states, read before labels only.
        """
        hidden_BTD = read_documents(self.draft, batch.input_ids_BT, batch.packed_positions_BT)
        places_N = upload(before_labels(batch.on_host).flatten().nonzero().squeeze(1), hidden_BTD.device)
        (target,), draft_ND = self._target, flat(hidden_BTD, places_N)
        rows = DraftRows(
            hidden_ND=draft_ND,
            head=self._draft_head(),
            weights_N=draft_ND.new_ones(len(draft_ND), dtype=torch.float32),
            places_N=torch.arange(len(draft_ND)),
            labels_N=flat(batch.input_ids_BT, places_N + 1) if "cross_entropy" in self._config.weights else None,
        )
        logits_of = model_head(target.model, self._shared_vocab_size).logits_of
        loss, (statistics,) = fused_loss(
            TargetRows(hidden_PE=flat(target_BTE, places_N), logits_of=logits_of),
            [rows],
            self._divergence,
            chunk_size=self._chunk_size,
            temperature=self._config.temperature,
            token_ids_W=self.token_ids_W,
            compiled=self._config.compiled,
        )
        return DraftLoss(loss, *statistics)

    def _draft_head(self) -> LogitHead:
        """Return the draft's head: whole, or the rows of a reduced vocabulary, gathered once for all chunks of a batch."""
        if self.token_ids_W is None:
            return model_head(self.draft, self._shared_vocab_size)
        rows = HeadRows.of(self.draft, self.token_ids_W)
        return LogitHead(logits_of=rows.logits, parameters=rows.parameters)

"""The target's side of a loss where several depths of a head are judged at the same positions.

With a reduced draft vocabulary only W of the target's V logits enter a divergence; the other V - W only through their sum.
That sum is computed once a position here, and each depth then costs a matrix product of W rows. Exact.
B batch, T positions, E width of the target, C rows of a chunk, N rows, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.losses import LOG_ZERO, Pair, at_least_float32
from heads.draft_vocabulary import HeadRows
from heads.lm_head import head_logits
from heads.training import Normalisers

TILE_ROWS = 16  # rows whose float32 copy stays in a CPU's cache; taking the largest of 16-bit numbers is slow there


@torch.no_grad()
def normalise(model: PreTrainedModel, hidden_BTE: Tensor, wanted_P: Tensor, *, chunk_size: int) -> Normalisers:
    """Compute the normalisers of final states at the places where `wanted_P` (bool) is True, a few rows at a time."""
    hidden_PE = hidden_BTE.flatten(0, 1)
    log_sum_P = at_least_float32(hidden_PE.new_zeros(len(hidden_PE)))
    top1_P = torch.zeros(len(hidden_PE), dtype=torch.int64, device=hidden_PE.device)
    for rows_C in wanted_P.nonzero().squeeze(-1).split(chunk_size):
        logits_CV = head_logits(model, hidden_PE[rows_C])
        for rows_R, logits_RV in zip(rows_C.split(TILE_ROWS), logits_CV.split(TILE_ROWS), strict=True):
            wide_RV = at_least_float32(logits_RV)
            log_sum_P[rows_R] = wide_RV.logsumexp(-1)
            top1_P[rows_R] = wide_RV.argmax(-1)
    return Normalisers(log_sum_P=log_sum_P, top1_P=top1_P)


@dataclass(frozen=True, kw_only=True)
class NormalisedRows:
    """Rows of whole distributions whose sums are known (`distill.target_rows.TargetRows`), at temperature 1."""

    hidden_NE: Tensor
    head: HeadRows
    log_sum_N: Tensor
    top1_N: Tensor

    def __len__(self) -> int:
        return len(self.hidden_NE)

    def at(self, rows_C: Tensor) -> NormalisedChunk:
        """Compute the W logits of these rows."""
        logits_CW = self.head.logits(self.hidden_NE[rows_C])
        return NormalisedChunk(logits_CW=logits_CW, log_sum_C=self.log_sum_N[rows_C], likeliest_C=self.top1_N[rows_C])


@dataclass(frozen=True, kw_only=True)
class NormalisedChunk:
    """W of the target's logits, and the sum over all of them."""

    logits_CW: Tensor
    log_sum_C: Tensor
    likeliest_C: Tensor
    is_dense: ClassVar[bool] = True

    @property
    def num_columns(self) -> int:
        """W."""
        return self.logits_CW.shape[-1]

    @property
    def top1_C(self) -> Tensor:
        """The likeliest token of each row, int64."""
        return self.likeliest_C

    def part(self, rows: slice) -> NormalisedChunk:
        """Return some of the rows."""
        return NormalisedChunk(
            logits_CW=at_least_float32(self.logits_CW[rows]), log_sum_C=self.log_sum_C[rows], likeliest_C=self.likeliest_C[rows]
        )

    def pair(
        self,
        draft_logits_CW: Tensor,
        *,
        temperature: float,
        draft_token_ids_W: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Pair:
        """Pair the rows with the draft's logits over the same W tokens; no labels.

        Raises:
            ValueError: another temperature than 1: the sum is that of the unscaled logits.
        """
        if temperature != 1 or labels is not None:
            raise ValueError("normalised rows are for temperature 1 and without labels")
        log_p_CW = at_least_float32(self.logits_CW) - self.log_sum_C.unsqueeze(-1)
        log_reach_C = log_p_CW.logsumexp(-1).clamp(min=LOG_ZERO)
        return Pair(
            log_p=log_p_CW.clamp_(min=LOG_ZERO),
            log_q=at_least_float32(draft_logits_CW).log_softmax(-1).clamp(min=LOG_ZERO),
            log_reach=log_reach_C,
        )

"""The target's side of a loss where several depths of a head are judged at the same positions.

With a reduced draft vocabulary only W of the target's V logits enter a divergence; the other V - W only through their sum.
That sum is computed once a position here, and each depth then costs a matrix product of W rows. Exact.
B batch, T positions, E width of the target, C rows of a chunk, N rows, V target vocabulary, W draft vocabulary.


The target's side of a loss: what it says at any of N rows, from hidden states and a head, or from a few kept tokens.

The chunked loss asks for a few rows at a time and pairs them with the draft's logits; it need not know which kind it has.
C rows of one chunk, E width of the target, K kept tokens, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.loss.divergences import LOG_ZERO, Pair, SparseTarget, at_least_float32, dense_pair, sparse_pair
from heads.inference.causal_lm import head_logits
from heads.modules.interface import Normalisers
from heads.proposers.vocabulary import HeadRows


class TargetChunk(Protocol):
    """What the target says at the rows of one chunk."""

    @property
    def is_dense(self) -> bool:
        """Whether `pair` gives each of the draft's tokens a bucket of its own, in their order, and has no other buckets."""

    @property
    def num_columns(self) -> int:
        """Values held of each row."""

    def part(self, rows: slice) -> TargetChunk:
        """Return some of the rows."""

    @property
    def top1_C(self) -> Tensor:
        """The likeliest token of each row, int64."""

    def pair(
        self,
        draft_logits_CW: Tensor,
        *,
        temperature: float,
        draft_token_ids_W: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Pair:
        """Pair the rows with the draft's logits; arguments as for `distill.loss.divergences.dense_pair`."""


class TargetRows(Protocol):
    """What the target says at N rows; never carries gradients."""

    def __len__(self) -> int: ...

    def at(self, rows_C: Tensor) -> TargetChunk:
        """Return the rows of these numbers, int64."""


@dataclass(frozen=True, kw_only=True)
class HiddenRows:
    """Rows of whole distributions: final hidden states `[N, E]`, of which `logits_of` makes `[C, V]`."""

    hidden_NE: Tensor
    logits_of: Callable[[Tensor], Tensor]

    def __len__(self) -> int:
        return len(self.hidden_NE)

    def at(self, rows_C: Tensor) -> DenseChunk:
        """Compute the logits of these rows."""
        return DenseChunk(logits_CV=self.logits_of(self.hidden_NE[rows_C]))


@dataclass(frozen=True, kw_only=True)
class SparseRows:
    """Rows of which only the K likeliest tokens, likeliest first, and the mass of all others are known."""

    target: SparseTarget

    def __len__(self) -> int:
        return len(self.target.log_probs)

    def at(self, rows_C: Tensor) -> SparseChunk:
        """Take these rows."""
        return SparseChunk(target=_rows_of(self.target, rows_C))


@dataclass(frozen=True, kw_only=True)
class DenseChunk:
    """Logits of the whole vocabulary, `[C, V]`."""

    logits_CV: Tensor
    is_dense: ClassVar[bool] = True

    @property
    def num_columns(self) -> int:
        """V."""
        return self.logits_CV.shape[-1]

    def part(self, rows: slice) -> DenseChunk:
        """Return some of the rows, their logits in float32 at least."""
        return DenseChunk(logits_CV=at_least_float32(self.logits_CV[rows]))

    @property
    def top1_C(self) -> Tensor:
        """The likeliest token of each row, int64."""
        return self.logits_CV.argmax(-1)

    def pair(
        self,
        draft_logits_CW: Tensor,
        *,
        temperature: float,
        draft_token_ids_W: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Pair:
        """Pair the rows with the draft's logits; see `distill.loss.divergences.dense_pair`."""
        return dense_pair(
            self.logits_CV, draft_logits_CW, temperature=temperature, draft_token_ids_W=draft_token_ids_W, labels=labels
        )


@dataclass(frozen=True, kw_only=True)
class SparseChunk:
    """The K likeliest tokens of each row, `[C, K]`, likeliest first, and the tail."""

    target: SparseTarget
    is_dense: ClassVar[bool] = False

    @property
    def num_columns(self) -> int:
        """K."""
        return self.target.log_probs.shape[-1]

    def part(self, rows: slice) -> SparseChunk:
        """Return some of the rows."""
        return SparseChunk(target=_rows_of(self.target, rows))

    @property
    def top1_C(self) -> Tensor:
        """The likeliest token of each row, int64."""
        return self.target.token_ids[:, 0]

    def pair(
        self,
        draft_logits_CW: Tensor,
        *,
        temperature: float,
        draft_token_ids_W: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Pair:
        """Pair the rows with the draft's logits; see `distill.loss.divergences.sparse_pair`.

        Raises:
            ValueError: another temperature than the recorded one, or a reduced draft vocabulary: the tail cannot follow.
        """
        if temperature != self.target.temperature:
            raise ValueError(f"the target was recorded at temperature {self.target.temperature}, asked for {temperature}")
        if draft_token_ids_W is not None:
            raise ValueError("a sparse target cannot be paired with a reduced draft vocabulary")
        return sparse_pair(self.target, draft_logits_CW, labels=labels)


def _rows_of(target: SparseTarget, rows: Tensor | slice) -> SparseTarget:
    return SparseTarget(
        log_probs=target.log_probs[rows],
        token_ids=target.token_ids[rows],
        log_tail=target.log_tail[rows],
        temperature=target.temperature,
    )


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
    """Rows of whole distributions whose sums are known (`distill.loss.target_logits.TargetRows`), at temperature 1."""

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

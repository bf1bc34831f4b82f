"""The target's side of the loss: its next-token distribution at any of N rows, a chunk of rows at a time.

The chunked loss takes a `TargetRows` and asks it for the rows of each chunk, which pair themselves with the draft's logits:
`HiddenRows` have hidden states and a head, `NormalisedRows` the same for a reduced draft vocabulary, `SparseRows` the top-k
tokens of a cache. None carries gradients.
B batch, T positions, E width of the target, C rows of a chunk, N rows, K kept tokens, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, Required, TypedDict, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.loss.divergences import LOG_ZERO, Pair, SparseTarget, at_least_float32, dense_pair, sparse_pair
from heads.inference.causal_lm import head_logits
from heads.modules.interface import Normalisers
from heads.proposers.vocabulary import HeadRows

TILE_ROWS = 16  # rows whose float32 copy stays in a CPU's cache; the maximum of 16-bit numbers is slow there


class PairOptions(TypedDict, total=False):
    """How rows are paired with the draft's logits; see `distill.loss.divergences.dense_pair`."""

    temperature: Required[float]
    draft_token_ids_W: Tensor | None
    labels: Tensor | None


class TargetRows(Protocol):
    """The target's distribution at N rows."""

    def __len__(self) -> int: ...

    def at(self, rows_C: Tensor) -> TargetChunk:
        """Return the rows with these indices, int64."""


class TargetChunk(Protocol):
    """The target's distribution at the rows of one chunk."""

    @property
    def is_dense(self) -> bool:
        """Whether the buckets of `pair` are the draft's tokens, all of them and in their order."""

    @property
    def num_columns(self) -> int:
        """Values held for each row."""

    @property
    def top1_C(self) -> Tensor:
        """The most likely token of each row, int64."""

    def part(self, rows: slice) -> TargetChunk:
        """Return some of the rows, logits in float32 at least."""

    def pair(self, draft_logits_CW: Tensor, **options: Unpack[PairOptions]) -> Pair:
        """Pair the rows with the draft's logits."""


@dataclass(frozen=True, kw_only=True)
class HiddenRows:
    """Final hidden states `[N, E]`, and `logits_of`, which maps `[C, E]` to `[C, V]`."""

    hidden_NE: Tensor
    logits_of: Callable[[Tensor], Tensor]

    def __len__(self) -> int:
        return len(self.hidden_NE)

    def at(self, rows_C: Tensor) -> DenseChunk:
        """Compute the logits of these rows."""
        return DenseChunk(logits_CV=self.logits_of(self.hidden_NE[rows_C]))


@dataclass(frozen=True, kw_only=True)
class DenseChunk:
    """Logits over the whole vocabulary, `[C, V]`."""

    logits_CV: Tensor
    is_dense: ClassVar[bool] = True

    @property
    def num_columns(self) -> int:
        """V."""
        return self.logits_CV.shape[-1]

    @property
    def top1_C(self) -> Tensor:
        """The most likely token of each row, int64."""
        return self.logits_CV.argmax(-1)

    def part(self, rows: slice) -> DenseChunk:
        """Return some of the rows."""
        return DenseChunk(logits_CV=at_least_float32(self.logits_CV[rows]))

    def pair(self, draft_logits_CW: Tensor, **options: Unpack[PairOptions]) -> Pair:
        """Pair the rows with the draft's logits; see `distill.loss.divergences.dense_pair`."""
        return dense_pair(self.logits_CV, draft_logits_CW, **options)


@dataclass(frozen=True, kw_only=True)
class NormalisedRows:
    """Final hidden states `[N, E]` with the normaliser of their logits over all V tokens, for a reduced draft vocabulary.

    A divergence needs W of the target's V logits, and the others only through their sum. With that sum computed once a
    position (`normalise`), each depth of a head costs a matrix product of W rows. Exact, at temperature 1.
    """

    hidden_NE: Tensor
    head: HeadRows
    log_sum_N: Tensor
    top1_N: Tensor

    def __len__(self) -> int:
        return len(self.hidden_NE)

    def at(self, rows_C: Tensor) -> NormalisedChunk:
        """Compute the W logits of these rows."""
        logits_CW = self.head.logits(self.hidden_NE[rows_C])
        return NormalisedChunk(logits_CW=logits_CW, log_sum_C=self.log_sum_N[rows_C], top1_C=self.top1_N[rows_C])


@dataclass(frozen=True, kw_only=True)
class NormalisedChunk:
    """The target's logits of the W draft tokens, `[C, W]`, and the log of the sum of exp(logits) over all V tokens, `[C]`."""

    logits_CW: Tensor
    log_sum_C: Tensor
    top1_C: Tensor
    is_dense: ClassVar[bool] = True

    @property
    def num_columns(self) -> int:
        """W."""
        return self.logits_CW.shape[-1]

    def part(self, rows: slice) -> NormalisedChunk:
        """Return some of the rows."""
        logits_RW = at_least_float32(self.logits_CW[rows])
        return NormalisedChunk(logits_CW=logits_RW, log_sum_C=self.log_sum_C[rows], top1_C=self.top1_C[rows])

    def pair(self, draft_logits_CW: Tensor, **options: Unpack[PairOptions]) -> Pair:
        """Pair the rows with the draft's logits over the same W tokens.

        Raises:
            ValueError: the temperature is not 1 (the sum is that of the unscaled logits), or there are labels.
        """
        if options["temperature"] != 1 or options.get("labels") is not None:
            raise ValueError("normalised rows are for temperature 1 and without labels")
        log_p_CW = at_least_float32(self.logits_CW) - self.log_sum_C.unsqueeze(-1)
        log_reach_C = log_p_CW.logsumexp(-1).clamp(min=LOG_ZERO)
        return Pair(
            log_p=log_p_CW.clamp_(min=LOG_ZERO),
            log_q=at_least_float32(draft_logits_CW).log_softmax(-1).clamp(min=LOG_ZERO),
            log_reach=log_reach_C,
        )


@torch.no_grad()
def normalise(model: PreTrainedModel, hidden_BTE: Tensor, wanted_P: Tensor, *, chunk_size: int) -> Normalisers:
    """Compute the normalisers of final states at the flat places where `wanted_P` (bool) is True, a few rows at a time."""
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
class SparseRows:
    """The K most likely tokens of each row, most likely first, and the mass of all others; both rows and chunk."""

    target: SparseTarget
    is_dense: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.target.log_probs)

    @property
    def num_columns(self) -> int:
        """K."""
        return self.target.log_probs.shape[-1]

    @property
    def top1_C(self) -> Tensor:
        """The most likely token of each row, int64."""
        return self.target.token_ids[:, 0]

    def at(self, rows_C: Tensor | slice) -> SparseRows:
        """Return some of the rows."""
        target = self.target
        return SparseRows(
            target=SparseTarget(
                log_probs=target.log_probs[rows_C],
                token_ids=target.token_ids[rows_C],
                log_tail=target.log_tail[rows_C],
                temperature=target.temperature,
            )
        )

    def part(self, rows: slice) -> SparseRows:
        """Return some of the rows."""
        return self.at(rows)

    def pair(self, draft_logits_CW: Tensor, **options: Unpack[PairOptions]) -> Pair:
        """Pair the rows with the draft's logits; see `distill.loss.divergences.sparse_pair`.

        Raises:
            ValueError: another temperature than the recorded one, or a reduced draft vocabulary, for which the tail cannot be
                split.
        """
        if options["temperature"] != self.target.temperature:
            recorded, wanted = self.target.temperature, options["temperature"]
            raise ValueError(f"the target was recorded at temperature {recorded}, asked for {wanted}")
        if options.get("draft_token_ids_W") is not None:
            raise ValueError("a sparse target cannot be paired with a reduced draft vocabulary")
        return sparse_pair(self.target, draft_logits_CW, labels=options.get("labels"))

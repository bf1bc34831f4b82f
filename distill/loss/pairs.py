"""Target and draft at the same N rows, paired a chunk of rows at a time: what every divergence is a function of.

The chunked loss takes `TargetRows`, the target's next-token distributions, and asks them for the rows of each chunk, which pair
themselves with the draft's logits: `HiddenRows` have hidden states and a head, `PlacedRows` share their logits with other parts
of the loss, `SparseTarget` has the top-k tokens of a cache. None carries gradients.
B batch, T positions, E width of the target, N rows, C rows of a chunk, V target vocabulary, W draft vocabulary, K kept tokens,
X buckets (V, W or K + 1); `...` any leading dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heads.device import keeps_small_tensors_near, upload
from heads.inference.causal_lm import head_logits
from heads.modules.interface import Normalisers
from heads.sampling.probabilities import greedy_token

TILE_ROWS = 16  # rows whose float32 copy stays in a CPU's cache; the maximum of 16-bit numbers is slow there
# Stands for log 0. Finite, so that 0 * log 0 is 0 and a gradient is never NaN; far below what logits of +-1e4 can reach.
LOG_ZERO = -1e5


class _Cached(cached_property[Tensor]):
    """A property that is computed once; each time under `torch.compile`, which joins equal operations and traces no lock."""

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        if instance is not None and torch.compiler.is_compiling():
            return self.func(instance)
        return super().__get__(instance, owner)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Target and draft at the same positions, over the same buckets, in float32 (or float64 where that came in).

    log_p: `[..., X]`, without gradient. Sums to less than 1 where the draft's vocabulary leaves tokens of the target out.
    log_q: `[..., X]`, sums to 1.
    log_reach: `[...]`, the logarithm of that sum of p; None where it is 1.
    label_log_q: `[...]`, log q of the label at temperature 1, and 0 where there is no label; None without labels.
    temperature: what both sides' logits were divided by.
    """

    log_p: Tensor
    log_q: Tensor
    log_reach: Tensor | None = None
    label_log_q: Tensor | None = None
    temperature: float = 1.0

    @_Cached
    def p(self) -> Tensor:
        """The target's probabilities `[..., X]`."""
        return self.log_p.exp()

    @_Cached
    def q(self) -> Tensor:
        """The draft's probabilities `[..., X]`."""
        return self.log_q.exp()

    @_Cached
    def log_p_within(self) -> Tensor:
        """The target's log-probabilities `[..., X]`, given that the token is one the draft can propose."""
        return self.log_p if self.log_reach is None else self.log_p - self.log_reach.unsqueeze(-1)

    @_Cached
    def p_within(self) -> Tensor:
        """The target's probabilities `[..., X]`, given that the token is one the draft can propose."""
        return self.p if self.log_reach is None else self.log_p_within.exp()


@dataclass(frozen=True, kw_only=True)
class HiddenRows:
    """Final hidden states `[N, E]`, and `logits_of`, which maps `[C, E]` to `[C, V]`; to `[C, W]` where `known` is given.

    A divergence over a reduced draft vocabulary needs W of the target's V logits, and the others only through their sum. With
    that sum `known` for each row, computed once a position (`normalise`), a depth of a head costs a matrix product of W rows.
    Exact, at temperature 1.
    """

    hidden_NE: Tensor
    logits_of: Callable[[Tensor], Tensor]
    known: Normalisers | None = None  # of the N rows

    def at(self, rows: slice) -> DenseChunk:
        return DenseChunk(logits_CX=self.logits_of(self.hidden_NE[rows]), known=normalisers_at(self.known, rows))


class SharedLogits:
    """The target's logits at P places that several parts of a loss read, of one chunk of places at a time.

    `hidden_PE` are the final hidden states there, `logits_of` as for `HiddenRows`.
    """

    def __init__(self, hidden_PE: Tensor, logits_of: Callable[[Tensor], Tensor], chunk_size: int) -> None:
        self.hidden_PE, self.logits_of, self.chunk_size = hidden_PE, logits_of, chunk_size
        self._kept: tuple[int, Tensor] | None = None

    @property
    def chunks(self) -> range:
        """Where chunks begin."""
        return range(0, len(self.hidden_PE), self.chunk_size)

    def of(self, start: int) -> Tensor:
        """Return the logits of a chunk, which are kept until those of another are asked for."""
        if self._kept is None or self._kept[0] != start:
            self._kept = None  # before the next ones are made
            self._kept = start, self.logits_of(self.hidden_PE[start : start + self.chunk_size])
        return self._kept[1]


@dataclass(frozen=True, kw_only=True)
class PlacedRows:
    """Rows that stand at some of the places of shared logits: at `places_N`, each once and rising, in host memory;
    `on_device_N` are the same."""

    shared: SharedLogits
    places_N: Tensor
    on_device_N: Tensor
    known: Normalisers | None = None  # of the N rows

    def within(self, start: int) -> slice:
        """Return the rows whose places lie in the chunk that begins there."""
        first, end = torch.searchsorted(self.places_N, torch.tensor([start, start + self.shared.chunk_size])).tolist()
        return slice(first, end)

    def at(self, rows: slice) -> DenseChunk:
        """Return rows that lie in one chunk, at least one."""
        start = int(self.places_N[rows.start]) // self.shared.chunk_size * self.shared.chunk_size
        logits_CX = self.shared.of(start)
        if rows.stop - rows.start < len(logits_CX):
            logits_CX = logits_CX[self.on_device_N[rows] - start]
        return DenseChunk(logits_CX=logits_CX, known=normalisers_at(self.known, rows))


@dataclass(frozen=True, kw_only=True)
class DenseChunk:
    """Logits `[C, V]`, any float type, or `[C, W]` of the draft tokens alone with the normalisers over all V tokens `known`."""

    logits_CX: Tensor
    known: Normalisers | None = None

    @property
    def num_columns(self) -> int:
        return self.logits_CX.shape[-1]

    @property
    def top1_C(self) -> Tensor:
        return greedy_token(self.logits_CX) if self.known is None else self.known.top1_P

    def at(self, rows: slice) -> DenseChunk:
        return DenseChunk(logits_CX=at_least_float32(self.logits_CX[rows]), known=normalisers_at(self.known, rows))

    def pair(
        self,
        draft_logits_CW: Tensor,
        *,
        temperature: float = 1.0,
        draft_token_ids_W: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Pair:
        """Pair the rows with the draft's logits `[..., V]`, or `[..., W]` of tokens whose ids in the target are given (d2t).

        `temperature` divides the logits of both sides, and is 1 where normalisers are known. `labels` `[...]` are **draft** ids
        of the next token, negative for none, and read by `cross_entropy` only.
        """
        num_shared = self.num_columns if draft_token_ids_W is None else len(draft_token_ids_W)
        if draft_logits_CW.shape[-1] != num_shared:
            raise ValueError(f"the draft has {draft_logits_CW.shape[-1]} logits a position where {num_shared} are expected")
        target = _scaled(self.logits_CX.detach(), temperature)
        if self.known is not None:
            log_p = target - self.known.log_sum_P.unsqueeze(-1)
        elif draft_token_ids_W is not None:
            log_p = target.log_softmax(-1).index_select(-1, draft_token_ids_W)
        else:
            log_p = target.log_softmax(-1)
        is_reduced = self.known is not None or draft_token_ids_W is not None
        log_reach = log_p.logsumexp(-1).clamp(min=LOG_ZERO) if is_reduced else None
        return Pair(
            log_p=log_p.clamp_(min=LOG_ZERO),
            log_q=_scaled(draft_logits_CW, temperature).log_softmax(-1).clamp(min=LOG_ZERO),
            log_reach=log_reach,
            label_log_q=_label_log_q(draft_logits_CW, labels),
            temperature=temperature,
        )


@dataclass(frozen=True, kw_only=True)
class SparseTarget:
    """The target's K most likely tokens at each of N rows, most likely first, and the mass of all others; rows and chunk.

    log_probs: `[N, K]` at temperature 1, any float type; token_ids: `[N, K]`, int64; log_tail: `[N]`, log of the other mass.
    """

    log_probs: Tensor
    token_ids: Tensor
    log_tail: Tensor

    @property
    def num_columns(self) -> int:
        return self.log_probs.shape[-1]

    @property
    def top1_C(self) -> Tensor:
        return self.token_ids[:, 0]

    def at(self, rows: slice) -> SparseTarget:
        return SparseTarget(log_probs=self.log_probs[rows], token_ids=self.token_ids[rows], log_tail=self.log_tail[rows])

    def pair(
        self,
        draft_logits_CW: Tensor,
        *,
        temperature: float = 1.0,
        draft_token_ids_W: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Pair:
        """Pair the rows with full rows of draft logits `[C, V]`.

        The tail is one more bucket, for both sides: X is K + 1. Merging tokens never adds to a divergence, so KL, JSD and total
        variation are lower bounds of the dense ones, and `acceptance` is an upper bound. For a reduced draft vocabulary the
        tail could not be split.
        """
        if temperature != 1 or draft_token_ids_W is not None:
            raise ValueError("a sparse target is for temperature 1, at which it was recorded, and the whole vocabulary")
        log_q = at_least_float32(draft_logits_CW).log_softmax(-1).clamp(min=LOG_ZERO)
        log_q_tail = log_q.scatter(-1, self.token_ids, LOG_ZERO).logsumexp(-1, keepdim=True)
        log_p = torch.cat([self.log_probs, self.log_tail.unsqueeze(-1)], dim=-1).detach()
        return Pair(
            # Stored in half precision the masses no longer add up to 1, and a KL of equal sides would not be 0.
            log_p=log_p.to(log_q.dtype).log_softmax(-1).clamp_(min=LOG_ZERO),
            log_q=torch.cat([log_q.gather(-1, self.token_ids), log_q_tail], dim=-1),
            label_log_q=_label_log_q(draft_logits_CW, labels),
        )


TargetRows = HiddenRows | PlacedRows | SparseTarget
TargetChunk = DenseChunk | SparseTarget


def normalisers_at(known: Normalisers | None, places: slice | Tensor) -> Normalisers | None:
    """Return normalisers at some places, None where there are none."""
    return None if known is None else Normalisers(log_sum_P=known.log_sum_P[places], top1_P=known.top1_P[places])


@torch.no_grad()
def normalise(model: PreTrainedModel, hidden_BTE: Tensor, places_N: Tensor, *, chunk_size: int) -> Normalisers:
    """Compute the normalisers of final states at flat places, each named once, a few rows at a time."""
    hidden_PE = hidden_BTE.flatten(0, 1)
    log_sum_P = at_least_float32(hidden_PE.new_zeros(len(hidden_PE)))
    top1_P = torch.zeros(len(hidden_PE), dtype=torch.int64, device=hidden_PE.device)
    for rows_C in upload(places_N, hidden_PE.device).split(chunk_size):
        logits_CV = head_logits(model, hidden_PE[rows_C])
        tile = TILE_ROWS if keeps_small_tensors_near(logits_CV.device) else chunk_size
        for rows_R, logits_RV in zip(rows_C.split(tile), logits_CV.split(tile), strict=True):
            wide_RV = at_least_float32(logits_RV)
            log_sum_P[rows_R] = wide_RV.logsumexp(-1)
            top1_P[rows_R] = greedy_token(logits_RV)
    return Normalisers(log_sum_P=log_sum_P, top1_P=top1_P)


def at_least_float32(values: Tensor) -> Tensor:
    """Return values in float32, or as they are in float64: what a divergence is computed in."""
    return values if values.dtype == torch.float64 else values.float()


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = at_least_float32(logits)
    return wide if temperature == 1 else wide / temperature


def _label_log_q(draft_logits: Tensor, labels: Tensor | None) -> Tensor | None:
    if labels is None:
        return None
    logits = at_least_float32(draft_logits)
    log_q = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    return torch.where(labels >= 0, log_q.clamp(min=LOG_ZERO), 0)

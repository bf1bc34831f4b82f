"""The target's side of a loss: what it says at any of N rows, from hidden states and a head, or from a few kept tokens.

The chunked loss asks for a few rows at a time and pairs them with the draft's logits; it need not know which kind it has.
C rows of one chunk, E width of the target, K kept tokens, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from distill.losses import Pair, SparseTarget, at_least_float32, dense_pair, sparse_pair


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
        """Pair the rows with the draft's logits; arguments as for `distill.losses.dense_pair`."""


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
        """Pair the rows with the draft's logits; see `distill.losses.dense_pair`."""
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
        """Pair the rows with the draft's logits; see `distill.losses.sparse_pair`.

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

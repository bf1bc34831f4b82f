"""What the decoder asks of anything that proposes tokens. The decoder knows no family by name, only this.

A round: `propose` continues the committed tokens, the target judges, `commit` tells how many stayed. Lists are on the host,
one entry a batch row. B batch, G drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from configs.schema import SamplingConfig
from heads.streams import Streams

Tokens = Sequence[Sequence[int]]  # committed ids by row: prompt and answer so far, the pending token last


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted tokens and the law each was drawn from.

    Args:
        tokens_BG: drafted ids; only the first `num_drafted[b]` of row b count.
        num_drafted: drafts by row, 0..G.
        probs_BGV: the law each token was drawn from; None says deterministic (a point mass on the token).
        logits_BGV: the raw logits behind it, kept only when the caller asked to measure overlap and the family has any.
    """

    tokens_BG: Tensor
    num_drafted: list[int]
    probs_BGV: Tensor | None = None
    logits_BGV: Tensor | None = None


class Proposer(Protocol):
    """A draft at work on one batch. One object serves one batch at a time; `start` makes it forget the last."""

    def start(self, tokens: Tokens, capacity: int) -> None:
        """Read the prompts. `tokens` end with the pending token; no row will ever hold more than `capacity` positions."""

    def propose(
        self, tokens: Tokens, num_tokens: int, sampling: SamplingConfig, streams: Streams, *, keep_logits: bool
    ) -> Proposal:
        """Continue each row by up to `num_tokens` (at least 1) drafts.

        Draws use the streams' draft role, in the round named by the row's length.
        """

    def commit(self, num_accepted: Sequence[int]) -> None:
        """Learn how many drafts of the last proposal each row kept; the target then added one token of its own."""

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""

"""From a family's logits to a proposal: the choice of each drafted token and the law it was drawn from.

Every family drafts through this, so that the law handed to verification is the law drawn from, in the target's ids, and that
draws use the draft's own stream in the round that is named by the row's length.
B batch, G drafts, W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from configs.schema import SamplingConfig
from heads.law import draw, token_law
from heads.proposer import Proposal
from heads.streams import Role, Streams

Spread = Callable[[Tensor, float], Tensor]


class Drafting:
    """One proposal in the making.

    Args:
        lengths: tokens by row, the pending one included; the first draft stands at that position.
        sampling: the law to draft by.
        streams: random numbers.
        target_ids: the target's ids of draft tokens.
        spread: puts values over the draft vocabulary at their places in the target's.
        keep_logits: keep the raw logits for measuring.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        sampling: SamplingConfig,
        streams: Streams,
        device: torch.device,
        target_ids: Callable[[Tensor], Tensor],
        spread: Spread,
        *,
        keep_logits: bool,
    ) -> None:
        self.sampling, self.streams, self.keep_logits = sampling, streams, keep_logits
        self.target_ids, self.spread = target_ids, spread
        self.lengths = list(lengths)
        self._first_B1 = torch.tensor(self.lengths, device=device).unsqueeze(1)
        self._drafted: list[Tensor] = []
        self._laws: list[Tensor] = []
        self._logits: list[Tensor] = []

    def add(self, logits_BW: Tensor) -> Tensor:
        """Choose the next draft of every row from its logits; return the target's ids `[B]`."""
        step = len(self._drafted)
        if self.sampling.temperature == 0:
            drafted_B = self.target_ids(logits_BW.argmax(-1))
        else:
            law_BW = token_law(logits_BW, self.sampling)
            uniform_B = self.streams.uniform(Role.DRAFT, self._first_B1 + step, self._first_B1).squeeze(1)
            drafted_B = self.target_ids(draw(law_BW, uniform_B))
            self._laws.append(self.spread(law_BW, 0.0))
        self._drafted.append(drafted_B)
        if self.keep_logits:
            self._logits.append(self.spread(logits_BW, float("-inf")))
        return drafted_B

    def proposal(self) -> Proposal:
        """Return what was drafted, as many tokens a row as there were calls of `add`."""
        return Proposal(
            tokens_BG=torch.stack(self._drafted, 1),
            num_drafted=[len(self._drafted)] * len(self.lengths),
            probs_BGV=torch.stack(self._laws, 1) if self._laws else None,
            logits_BGV=torch.stack(self._logits, 1) if self._logits else None,
        )

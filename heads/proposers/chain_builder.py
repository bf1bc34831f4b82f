"""A chain of drafts from a family's logits: the choice of each token, and the distribution it was drawn from.

Every family drafts through this, so that verification gets the very distribution that was drawn from, draws use `Role.DRAFT` in
the round named by the row's length, and each row ends by the decoder's stopping rule. A family that drafts one token after
another stops when all rows are `finished`; one that has all distributions from a single forward adds them all.
B batch, G drafts, W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from configs.runtime.errors import InputError
from configs.schema.decoding import SamplingConfig
from heads.proposers.draft_length import reads_estimate, rule_for, sampling_for_stopping
from heads.proposers.protocol import Proposal
from heads.sampling.counter_rng import CounterRNG, Role
from heads.sampling.probabilities import draw, greedy_token, token_probabilities
from heads.uploads import RowNumbers, on_device
from heads.vocabulary import DraftVocabulary, over_target, target_ids


class ChainBuilder:
    """A proposal of chains, one draft a row for each call of `add`.

    Args:
        lengths: tokens by row, the pending one included; the first draft stands at that position.
        sampling: the distribution to draft by, and when to stop.
        vocabulary: the tokens that logits are over; None: the target's.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        sampling: SamplingConfig,
        rng: CounterRNG,
        vocabulary: DraftVocabulary | None,
        *,
        keep_logits: bool,
    ) -> None:
        self.sampling, self.rng, self.keep_logits = sampling, rng, keep_logits
        self.vocabulary = vocabulary
        self.lengths, self.device = lengths, rng.requests_B.device
        self._rule, self._by_estimate = rule_for(sampling), reads_estimate(sampling)
        self._open_B = torch.ones(len(self.lengths), dtype=torch.bool, device=self.device)  # rows that still draft
        self._num_drafted_B = torch.zeros(len(self.lengths), dtype=torch.int64, device=self.device)
        self._drafted: list[Tensor] = []
        self._distributions: list[Tensor] = []
        self._logits: list[Tensor] = []
        self._estimates: list[Tensor] = []

    def add(self, logits_BW: Tensor, estimate_B: Tensor | None = None) -> Tensor:
        """Choose the next draft of every row from its logits; return the target's ids `[B]`.

        Rows that have stopped get one too, which does not count.

        Args:
            logits_BW: of the draft's vocabulary.
            estimate_B: the draft's own estimate of its acceptance (`Proposal.estimates_BG`); None: it makes none.

        Raises:
            InputError: the stopping rule reads the draft's estimate, and there is none.
        """
        step, greedy = len(self._drafted), self.sampling.temperature == 0
        if not greedy or self._rule is not None:
            probs_BW = token_probabilities(logits_BW, sampling_for_stopping(self.sampling))
            self._decide(probs_BW, estimate_B)
        if greedy:
            drafted_B = target_ids(self.vocabulary, greedy_token(logits_BW))
        else:
            drafted_B = self._drawn(step, probs_BW)
            self._distributions.append(over_target(self.vocabulary, probs_BW, 0.0))
        self._drafted.append(drafted_B)
        if self.keep_logits:
            self._logits.append(over_target(self.vocabulary, logits_BW, float("-inf")))
        if estimate_B is not None:
            self._estimates.append(estimate_B)
        return drafted_B

    def peek(self, logits_BGW: Tensor) -> Tensor:
        """Return the target's ids `[B, G]` that `add` would choose from these logits for the first G drafts; adds none."""
        if self.sampling.temperature == 0:
            return target_ids(self.vocabulary, greedy_token(logits_BGW))
        probs_BGW = token_probabilities(logits_BGW, self.sampling)
        return torch.stack([self._drawn(step, probs_BW) for step, probs_BW in enumerate(probs_BGW.unbind(1))], 1)

    @property
    def finished(self) -> bool:
        """Whether every row has stopped. With a stopping rule this waits for the device."""
        return self._rule is not None and not bool(self._open_B.any())

    def proposal(self) -> Proposal:
        """Return the drafts: a token a row for each call of `add`, fewer where the row stopped."""
        num_drafted = RowNumbers.alike(len(self._drafted), len(self.lengths), self.device)
        if self._rule is not None:
            num_drafted = RowNumbers(self._num_drafted_B.tolist(), self.device, lambda: self._num_drafted_B)
        # No wider than the longest draft: the target computes every column, drafted or not.
        width = max(num_drafted)
        return Proposal(
            tokens_BG=torch.stack(self._drafted, 1)[:, :width],
            num_drafted=num_drafted,
            probs_BGV=torch.stack(self._distributions[:width], 1) if self._distributions[:width] else None,
            logits_BGV=torch.stack(self._logits[:width], 1) if self._logits[:width] else None,
            estimates_BG=torch.stack(self._estimates[:width], 1) if self._estimates[:width] else None,
        )

    def _drawn(self, step: int, probs_BW: Tensor) -> Tensor:
        first_B1 = on_device(self.lengths, self.device).unsqueeze(1)
        uniform_B = self.rng.uniform(Role.DRAFT, first_B1 + step, first_B1).squeeze(1)
        return target_ids(self.vocabulary, draw(probs_BW, uniform_B))

    def _decide(self, probs_BW: Tensor, estimate_B: Tensor | None) -> None:
        if self._rule is None:
            return
        if self._by_estimate:
            if estimate_B is None:
                raise InputError(
                    "decode.stopping.by is estimate, and this draft makes no estimate of its acceptance (dspark does): set it "
                    "to distribution"
                )
            probs_BW = estimate_B.unsqueeze(-1)  # rules read the largest value
        drafts_B, continues_B = self._rule.decide(probs_BW)
        self._num_drafted_B += self._open_B & drafts_B
        self._open_B &= continues_B

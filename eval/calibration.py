"""Is a draft as often right as it is sure? Confidence against acceptance: the reliability curve and its error.

`ConfidenceProbe` goes around a proposer and notes, while the decoder runs, how sure it was of each judged draft and whether the
target kept it. `CalibrationCurve` makes a curve of such pairs, and `eval.draft_lengths` settings of them.

What is paired: the confidence of the law a draft was drawn from (`heads.stopping.confidence`, at temperature 1 where decoding
is greedy), and acceptance given that all drafts before it were accepted. torchmetrics' BinaryCalibrationError gives the same
error from lists of all pairs, and no curve; here both come from sums by bin, which any number of ranks can add up.
B batch, G drafts, N bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from configs.schema import SamplingConfig
from heads.law import token_law
from heads.proposer import Proposal, Proposer, Tokens
from heads.stopping import confidence, looked_at
from heads.streams import Streams
from heads.target_states import TargetStates


@dataclass(frozen=True, kw_only=True)
class DraftedRound:
    """The confidences of a round's drafts and how many of them were accepted; the next one, if any, was refused."""

    confidences: tuple[float, ...]
    num_accepted: int

    @property
    def pairs(self) -> list[tuple[float, bool]]:
        """Confidence and acceptance of each judged draft. Those behind the first refused one were not judged."""
        return [(sure, place < self.num_accepted) for place, sure in enumerate(self.confidences[: self.num_accepted + 1])]


class ConfidenceProbe:
    """A proposer that notes every round in `rounds` and is otherwise the one it goes around.

    An answer's last round is left out: where an answer ends, drafts may stand behind the last judged one that look refused.
    Proposals without a law (lookups) leave nothing to note.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.proposer, self.taps = proposer, proposer.taps
        self.rounds: list[DraftedRound] = []
        self._confidences: list[list[float]] = []
        self._pending: list[DraftedRound | None] = []  # by row: the last round, until it is known to have a successor

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self._pending = []
        self.proposer.start(tokens, capacity, states)

    def propose(
        self, tokens: Tokens, num_tokens: int, sampling: SamplingConfig, streams: Streams, *, keep_logits: bool
    ) -> Proposal:
        self.rounds += [round_ for round_ in self._pending if round_ is not None]
        proposal = self.proposer.propose(tokens, num_tokens, sampling, streams, keep_logits=True)
        self._confidences = _confidences(proposal, sampling)
        return proposal

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        self._pending = [
            DraftedRound(confidences=tuple(sure), num_accepted=accepted) if sure else None
            for sure, accepted in zip(self._confidences, num_accepted, strict=True)
        ]
        self.proposer.commit(num_accepted, states)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._pending = [self._pending[row] for row in rows]
        self.proposer.keep_rows(rows)


class CalibrationCurve(Metric):
    """Confidence against acceptance in bins of equal width, with the expected calibration error (Guo et al. 2017).

    Args:
        num_bins: how many.
    """

    full_state_update = False
    count_N: Tensor
    confidence_N: Tensor
    accepted_N: Tensor

    def __init__(self, num_bins: int = 15) -> None:
        super().__init__()
        self.add_state("count_N", torch.zeros(num_bins, dtype=torch.int64), dist_reduce_fx="sum")
        for name in ("confidence_N", "accepted_N"):
            self.add_state(name, torch.zeros(num_bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, pairs: Sequence[tuple[float, bool]]) -> None:
        """Add pairs of a confidence in [0, 1] and whether the draft was accepted."""
        table = torch.tensor(pairs, dtype=torch.float64, device=self.count_N.device).reshape(-1, 2)
        confidences, accepted = table.unbind(1)
        num_bins = len(self.count_N)
        bins = (confidences * num_bins).long().clamp(max=num_bins - 1)
        self.count_N += torch.bincount(bins, minlength=num_bins)
        self.confidence_N += torch.bincount(bins, confidences, minlength=num_bins)
        self.accepted_N += torch.bincount(bins, accepted, minlength=num_bins)

    def compute(self) -> dict[str, Any]:
        """Return `expected_calibration_error` (None without pairs), `num_drafts`, and of each bin that has any, in `bins`:

        `low` and `high` bounds, `num_drafts`, mean `confidence`, mean `acceptance`.
        """
        total, num_bins = int(self.count_N.sum()), len(self.count_N)
        gaps_N = (self.confidence_N - self.accepted_N).abs()
        return {
            "expected_calibration_error": float(gaps_N.sum()) / total if total else None,
            "num_drafts": total,
            "bins": [
                {
                    "low": number / num_bins,
                    "high": (number + 1) / num_bins,
                    "num_drafts": count,
                    "confidence": float(self.confidence_N[number]) / count,
                    "acceptance": float(self.accepted_N[number]) / count,
                }
                for number, count in enumerate(self.count_N.tolist())
                if count
            ],
        }


def _confidences(proposal: Proposal, sampling: SamplingConfig) -> list[list[float]]:
    """Return how sure the draft was of each token it proposed, by row."""
    if proposal.logits_BGV is None:
        return [[] for _ in proposal.num_drafted]
    sure_BG = confidence(token_law(proposal.logits_BGV, looked_at(sampling)))
    return [row[:count] for row, count in zip(sure_BG.tolist(), proposal.num_drafted, strict=True)]

"""How sure a draft was of each token of a round, the whole round long, and how many of them the target kept.

`ConfidenceProbe` goes around a proposer and notes it while the decoder runs; `eval.draft_lengths` makes settings of such
rounds. What is paired: the confidence of the law a draft was drawn from (`heads.stopping.confidence`, at temperature 1 where
decoding is greedy), and acceptance given that all drafts before it were accepted. The report has the same pairs by class of
confidence (`eval.law_metrics.StoppingCalibration`), and not the drafts behind the first refused one, which the price of time
asks for. B batch, G drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.decoding import SamplingConfig
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
    Proposals without a law (lookups) leave nothing to note. Not for self-speculation, which the decoder has to see itself.
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


def _confidences(proposal: Proposal, sampling: SamplingConfig) -> list[list[float]]:
    """Return how sure the draft was of each token it proposed, by row."""
    if proposal.logits_BGV is None:
        return [[] for _ in proposal.num_drafted]
    sure_BG = confidence(token_law(proposal.logits_BGV, looked_at(sampling)))
    return [row[:count] for row, count in zip(sure_BG.tolist(), proposal.num_drafted, strict=True)]

"""The expected number of rounds of an answer, for any number of drafts, from the acceptance measured at one.

It follows from the measured chance at each position that a draft is accepted where those before it were, never from powers of
one rate; positions beyond those measured take the last one's chance. Where a draft's guess depends on the text alone, fewer
drafts than measured do not simply cut the measured rounds short: easy stretches of text then fill more rounds, and weigh more.
The last rounds of an answer have less room, and are counted so. G drafts, A accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from eval.decoder.records import ENDED, Generation
from eval.report.sections import AnswerLength

Floats = NDArray[np.float64]


class AcceptanceProfile:
    """How many of a round's drafts are accepted.

    Args:
        conditional: by position, the share accepted of the drafts judged there (`position_conditional` of the report), for
            the largest number of drafts measured; `None` where none was judged.
        by_text_alone: the draft's guess at a place of the text does not depend on where the round began, as that of a draft
            model; a head's guess is better nearer to the target's last hidden state.

    Raises:
        ValueError: no draft was judged.
    """

    def __init__(self, conditional: Sequence[float | None], *, by_text_alone: bool) -> None:
        known = [share for share in conditional if share is not None]
        if not known:
            raise ValueError("no draft was judged, so that there is no acceptance to predict from")
        self.conditional = known
        self.by_text_alone = by_text_alone

    def accepted(self, num_drafts: int) -> Floats:
        """Return the chances `[G + 1]` that 0, 1, ... of as many drafts are accepted, over all rounds that draft so many."""
        if self.by_text_alone and num_drafts < len(self.conditional):
            return self._split(num_drafts)
        return self._accepted(num_drafts)

    def tokens_per_round(self, num_drafts: int) -> float:
        """Return the tokens to be expected of a round: 1 and the survival at each position."""
        return float(1 + self.accepted(num_drafts) @ np.arange(num_drafts + 1))

    def _accepted(self, num_drafts: int) -> Floats:
        missing = num_drafts - len(self.conditional)
        chances_G = np.array([*self.conditional, *[self.conditional[-1]] * missing][:num_drafts])
        reached_A = np.concatenate([[1.0], np.cumprod(chances_G)])  # the chance to keep at least so many
        return reached_A * np.append(1 - chances_G, 1.0)

    def _split(self, num_drafts: int) -> Floats:
        """Read the stretches of text that the measured rounds covered once more, in shorter rounds.

        A measured round that kept a drafts covers a places where the draft is right and one where it is wrong: shorter rounds
        never reach across the latter. The place behind a round that kept all is unknown; it is taken for right with the
        last position's chance, and a shorter round that reaches over it for as much of a whole one as lies before.
        """
        size, longest = num_drafts + 1, len(self.conditional)
        rounds_A = np.zeros(size)
        for accepted, share in enumerate(self._accepted(longest)):
            whole, rest = divmod(accepted + 1, size)
            rounds_A[num_drafts] += share * whole
            if rest:
                right = self.conditional[-1] if accepted == longest else 0.0
                rounds_A[rest - 1] += share * (1 - right)
                rounds_A[num_drafts] += share * right * rest / size
        split_A: Floats = rounds_A / rounds_A.sum()
        return split_A


def answer_lengths(generations: Iterable[Generation], max_new_tokens: int) -> list[AnswerLength]:
    """Count answers by their length; those without rounds are left out, as they are of every speed."""
    counts = Counter(
        (len(each.tokens) - 1, max_new_tokens - len(each.tokens) if each.stop_reason in ENDED else 0)
        for each in generations
        if len(each.tokens) > 1
    )
    return [AnswerLength(num_tokens=n, room_behind=behind, num_answers=count) for (n, behind), count in sorted(counts.items())]


def expected_rounds(profile: AcceptanceProfile, num_drafts: int, answers: Iterable[AnswerLength]) -> Floats:
    """Return how many rounds with 0, 1, ..., `num_drafts` drafts the answers are expected to take, `[G + 1]`.

    Rounds are assumed independent of each other, and the length of an answer given: drafts behind its end are wasted.
    """
    accepted = [profile.accepted(drafts) for drafts in range(num_drafts + 1)]
    rounds_G = np.zeros(num_drafts + 1)
    for answer in answers:
        rounds_G += answer.num_answers * _rounds_of_one(accepted, answer)
    return rounds_G


def _rounds_of_one(accepted: Sequence[Floats], answer: AnswerLength) -> Floats:
    """Walk down from the whole answer; `begins[m]` is the chance that a round begins with m tokens still to come."""
    rounds_G = np.zeros(len(accepted))
    begins = np.zeros(answer.num_tokens + 1)
    begins[-1] = 1.0
    for left in range(answer.num_tokens, 0, -1):
        drafts = min(len(accepted) - 1, left - 1 + answer.room_behind)
        rounds_G[drafts] += begins[left]
        useful = min(drafts + 1, left - 1)  # outcomes after which something is left
        begins[left - useful : left] += begins[left] * accepted[drafts][:useful][::-1]
    return rounds_G

"""What speculation gains by number of drafts and batch on this machine: the report's `speed.predicted`.

The tokens of a round follow from the measured chance at each position that a draft is accepted where those before it were. A
round's seconds are those of the timing sweep, interpolated over the logarithm of the batch between those timed; outside of
these nothing is said. A batch is taken to stay full, and answers to have no end. G drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from eval.report.schema import PredictedSection, PredictedSpeedup, TimedRound


class Prediction:
    """Decode speedups by number of drafts and batch, from a sweep and the share accepted at each position."""

    def __init__(self, sweep: Sequence[TimedRound], conditional: Sequence[float | None]) -> None:
        shares = [share for share in conditional if share is not None]
        self.sweep, self.longest = sweep, max(each.num_speculative_tokens for each in sweep)
        # A position that was not measured takes the last one's share.
        self.reached_G = np.cumprod(
            [*shares, *shares[-1:] * self.longest][: self.longest]
        )  # the chance to keep at least so many

    def speedup(self, drafts: int, batch: int) -> float:
        """Return plain decoding's seconds a token over those with as many drafts a round; both were timed around `batch`."""
        # The row that kept most decides what the draft reads next.
        after_full = 1 - (1 - float(self.reached_G[drafts - 1])) ** batch
        tokens = 1 + float(self.reached_G[:drafts].sum())
        return tokens * self._seconds(0, batch, 0.0) / self._seconds(drafts, batch, after_full)

    def best(self, batch: int) -> int | None:
        """Return the fastest number of drafts; None where plain decoding is faster."""
        drafts = max(range(1, self.longest + 1), key=lambda each: self.speedup(each, batch))
        return drafts if self.speedup(drafts, batch) > 1 else None

    def batches(self, own: int) -> list[int]:
        """Return batch sizes within those timed: these, the powers of two, and the run's own."""
        timed = {each.batch_size for each in self.sweep}
        powers = {2**power for power in range(max(timed).bit_length())}
        return sorted(each for each in timed | powers | {own} if min(timed) <= each <= max(timed))

    def _seconds(self, drafts: int, batch: int, after_full: float) -> float:
        """Return the seconds of a round, `after_full` being the chance that the round before kept all drafts."""
        rounds = sorted((each.batch_size, each) for each in self.sweep if each.num_speculative_tokens == drafts)
        seconds = [
            each.verify_seconds
            + each.other_seconds
            + (1 - after_full) * each.draft_seconds
            + after_full * each.draft_seconds_after_full
            for _, each in rounds
        ]
        return float(np.interp(math.log(batch), [math.log(size) for size, _ in rounds], seconds))


def predict_speed(
    sweep: Sequence[TimedRound], conditional: Sequence[float | None], *, drafts: int, batch: int, context: int
) -> PredictedSection:
    """Return what a sweep, in which something was drafted, says of this run's own drafts and batch, and of others."""
    prediction = Prediction(sweep, conditional)
    batches, numbers = prediction.batches(batch), range(1, prediction.longest + 1)
    paying = [size for size in batches if prediction.best(size) is not None]
    return PredictedSection(
        context_tokens=context,
        settings=[
            PredictedSpeedup(num_speculative_tokens=each, batch_size=size, decode_speedup=prediction.speedup(each, size))
            for size in batches
            for each in numbers
        ],
        decode_speedup=prediction.speedup(drafts, batch) if drafts in numbers and batch in batches else None,
        best_num_speculative_tokens=prediction.best(batch) if batch in batches else None,
        break_even_batch_size=max(paying, default=0),
        sweep=list(sweep),
    )

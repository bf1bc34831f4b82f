"""The timing sweep: rounds of other numbers of drafts and batches, and the speedups that follow from them.

The tokens of a round follow from the measured chance at each position that a draft is accepted where those before it were. Its
seconds are those of decoding some prompts of the suite, interpolated over the logarithm of the batch between the batches timed;
outside of these nothing is said. A batch is taken to stay full, and answers to have no end. Trees and stopping rules are left
out: their sizes depend on the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import CostConfig
from eval.decoder.decode import decode as decode_batch
from eval.decoder.records import Request
from eval.measure.interleaved import time_ways
from eval.report.schema import PredictedSection, PredictedSpeedup, TimedRound
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposer

SWEPT_TOKENS = 16  # of each answer of a sweep

# --- the sweep ------------------------------------------------------------------------------------------------------


def sweep_rounds(
    target: Target, proposer: Proposer, requests: Sequence[Request], decode: DecodeConfig, config: CostConfig
) -> list[TimedRound]:
    """Time rounds of every number of drafts, up to as many as the draft can, at the batches asked for.

    Empty where nothing is drafted.
    """
    target = replace(target, eos_token_ids=())  # no round may end the text

    def run(drafts: int, batch: Sequence[Request]) -> tuple[float, int, int]:
        """Return the seconds of decoding, its rounds, and the most drafts of one."""
        sizes = {"num_speculative_tokens": drafts, "batch_size": len(batch), "max_new_tokens": SWEPT_TOKENS}
        settings = decode.model_copy(update=sizes)
        generations, timing = decode_batch(target, batch, settings, proposer)
        rounds = max((each.rounds for each in generations), key=len)
        return timing.decode_seconds, len(rounds), max((len(each.drafted) for each in rounds), default=0)

    *_, longest = run(config.num_speculative_tokens, requests[:1])
    if longest == 0:
        return []
    sweep = []
    for size in config.batch_sizes:
        starts = range(0, config.repeats * size, size)
        batches = [[requests[number % len(requests)] for number in range(start, start + size)] for start in starts]
        found = time_ways(batches, {drafts: partial(run, drafts) for drafts in range(longest + 1)})
        sweep += [TimedRound(num_speculative_tokens=each, batch_size=size, seconds=found[each]) for each in found]
    return sweep


class Prediction:
    """Decode speedups by number of drafts and batch, from a sweep and the share accepted at each position."""

    def __init__(self, sweep: Sequence[TimedRound], conditional: Sequence[float | None]) -> None:
        shares = [share for share in conditional if share is not None]
        self.sweep, self.longest = sweep, max(each.num_speculative_tokens for each in sweep)
        # The chance to keep at least so many; a position that was not measured takes the last one's share.
        self.reached_G = np.cumprod([*shares, *shares[-1:] * self.longest][: self.longest])

    def speedup(self, drafts: int, batch: int) -> float:
        """Return plain decoding's seconds a token over those with as many drafts a round; both were timed around `batch`."""
        tokens = 1 + float(self.reached_G[:drafts].sum())
        return tokens * self._seconds(0, batch) / self._seconds(drafts, batch)

    def best(self, batch: int) -> int | None:
        """Return the fastest number of drafts; None where plain decoding is faster."""
        drafts = max(range(1, self.longest + 1), key=lambda each: self.speedup(each, batch))
        return drafts if self.speedup(drafts, batch) > 1 else None

    def batches(self, own: int) -> list[int]:
        """Return batch sizes within those timed: these, the powers of two, and the run's own."""
        timed = {each.batch_size for each in self.sweep}
        powers = {2**power for power in range(max(timed).bit_length())}
        return sorted(each for each in timed | powers | {own} if min(timed) <= each <= max(timed))

    def _seconds(self, drafts: int, batch: int) -> float:
        rounds = sorted((each.batch_size, each.seconds) for each in self.sweep if each.num_speculative_tokens == drafts)
        return float(np.interp(math.log(batch), [math.log(size) for size, _ in rounds], [seconds for _, seconds in rounds]))


def predict_speed(
    sweep: Sequence[TimedRound], conditional: Sequence[float | None], *, drafts: int, batch: int
) -> PredictedSection:
    """Return what a sweep, in which something was drafted, says of this run's own drafts and batch, and of others."""
    prediction = Prediction(sweep, conditional)
    batches, numbers = prediction.batches(batch), range(1, prediction.longest + 1)
    paying = [size for size in batches if prediction.best(size) is not None]
    return PredictedSection(
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

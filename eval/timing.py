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


def predict_speed(sweep: Sequence[TimedRound], conditional: Sequence[float | None], *, batch: int) -> PredictedSection:
    """Return decode speedups by number of drafts and batch, from a sweep in which something was drafted and the share accepted
    at each position. The batches lie within those timed: these, the powers of two, and the run's own, `batch`.
    """
    shares = [share for share in conditional if share is not None]
    longest, timed = max(each.num_speculative_tokens for each in sweep), {each.batch_size for each in sweep}
    # The chance to keep at least so many; a position that was not measured takes the last one's share.
    reached_G = np.cumprod([*shares, *shares[-1:] * longest][:longest])
    powers = {2**power for power in range(max(timed).bit_length())}
    return PredictedSection(
        settings=[
            PredictedSpeedup(
                num_speculative_tokens=drafts,
                batch_size=size,
                decode_speedup=(1 + float(reached_G[:drafts].sum())) * _seconds(sweep, 0, size) / _seconds(sweep, drafts, size),
            )
            for size in sorted(each for each in timed | powers | {batch} if min(timed) <= each <= max(timed))
            for drafts in range(1, longest + 1)
        ],
        sweep=list(sweep),
    )


def _seconds(sweep: Sequence[TimedRound], drafts: int, batch: int) -> float:
    """Return the seconds of a round, on a line over the logarithm of the batch between those timed."""
    rounds = sorted((math.log(each.batch_size), each.seconds) for each in sweep if each.num_speculative_tokens == drafts)
    return float(np.interp(math.log(batch), [size for size, _ in rounds], [seconds for _, seconds in rounds]))

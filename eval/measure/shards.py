"""A measurement shared by the processes of `accelerate launch`: each decodes its batches, the main one gets all numbers.

Every suite is counted by itself. Batches are cut from the prompts of each before they are shared out, so that the same rows are
decoded together however many processes there are. A run that was cut off goes on after the last batch that each process
finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from configs.runtime.errors import RunFailed
from configs.runtime.terminal import progress
from configs.schema.evaluation import LOOKUPS, EvalConfig
from eval.measure.interleaved import Measurement, in_batches
from eval.measure.record_files import BatchFiles
from eval.measure.turns import Turns
from eval.metrics.energy import Meter
from eval.metrics.tally import Tally
from heads.frozen.loading import Target
from heads.frozen.processes import share_of
from heads.proposers.protocol import Proposer


def measure_share(
    target: Target,
    turns: Turns,
    config: EvalConfig,
    proposers: Mapping[str, Proposer],
    state: PartialState,
    meter: Meter | None = None,
    *,
    job: str,
) -> dict[str, Tally] | None:
    """Decode this process's share of the prompts; return what all processes measured, by suite, in the main one, and None in
    the others. Where processes share the target, all have it.

    Writes `records.jsonl` into `config.output`, which exists, and leaves there what a run with the same `job` resumes from
    (`eval.measure.record_files.drop_batches`).

    Raises:
        InputError: the folder cannot be written.
        RunFailed: not one batch could be decoded in every mode.
    """
    by_suite = [list(requests) for _, requests in groupby(turns.first, key=lambda request: request.suite)]
    batches = [batch for requests in by_suite for batch in in_batches(requests, config.decode.batch_size)]
    share = share_of(target.group, state)
    mine = range(share.number, len(batches), share.count)
    measurement = Measurement(target, config, proposers, turns.follow, meter)
    lengths: dict[str, int] = dict.fromkeys(LOOKUPS, config.lookup_length)
    tallies = {requests[0].suite: Tally(config.decode.num_speculative_tokens, lengths) for requests in by_suite}
    (job,) = broadcast_object_list([job])  # the machines of several processes may differ
    files = BatchFiles(Path(config.output), job)
    measurement.warm_up([batches[number] for number in mine])
    finished = share.in_all(number for number in mine if files.finished(number) is not None)
    sizes = {number: len(batches[number]) for number in mine}
    resumed = sum(sizes[number] for number in finished)
    with progress("decoding", sum(sizes.values()), "prompts", done=resumed) as advance:
        for number in mine:
            tally = tallies[batches[number][0].suite]
            kept = files.finished(number) if number in finished else None
            if kept is None:
                measured = measurement.measure_batch(batches[number])
                if share.writes:
                    files.write(number, measured.generations, measured.timings)
                advance(sizes[number])
            else:
                measured = measurement.take_over(kept)
                tally.num_resumed += sizes[number]
            tally.add(measured.generations, measured.timings)
    shares = share.gather([tallies])
    if state.is_main_process:
        files.join(len(batches))
    elif target.group is None:
        return None
    return _put_together(shares, turns)


def _put_together(tallies: Sequence[dict[str, Tally]], turns: Turns) -> dict[str, Tally]:
    """Merge the processes' tallies, in the order of the prompts."""
    whole, *others = tallies
    for suite, tally in whole.items():
        for other in others:
            tally.merge(other[suite])
        tally.sort([request.prompt_id for request in turns.first])
    if turns.first and not any(tally.timings for tally in whole.values()):
        raise RunFailed("not one batch could be decoded in every mode; what went wrong is in the log above")
    return whole

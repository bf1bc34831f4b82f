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
from accelerate.utils import gather_object

from configs.runtime.errors import RunFailed
from configs.runtime.progress import progress
from configs.schema.evaluation import EvalConfig
from eval.measure.interleaved import Measurement, in_batches
from eval.measure.record_files import RecordSpan, RecordWriter, join_parts
from eval.measure.turns import Turns
from eval.metrics.meters import Meter
from eval.metrics.tally import Tally
from heads.proposers.protocol import Proposer
from heads.target.loading import Target


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
    the others.

    Writes `records.jsonl` into `config.output`, which exists, and leaves there what a run with the same `job` resumes from
    (`eval.measure.record_files.drop_parts`).

    Raises:
        InputError: the folder cannot be written.
        RunFailed: not one batch could be decoded in every mode.
    """
    by_suite = [list(requests) for _, requests in groupby(turns.first, key=lambda request: request.suite)]
    batches = [batch for requests in by_suite for batch in in_batches(requests, config.decode.batch_size)]
    mine = range(state.process_index, len(batches), state.num_processes)
    measurement = Measurement(target, config, proposers, turns.follow, meter)
    tallies = {requests[0].suite: Tally(config.decode.num_speculative_tokens) for requests in by_suite}
    with (
        RecordWriter(Path(config.output), state.process_index, job) as writer,
        progress("decoding", sum(len(batches[number]) for number in mine), "prompts") as advance,
    ):
        measurement.warm_up([batches[number] for number in mine])
        for number in mine:
            tally = tallies[batches[number][0].suite]
            if (kept := writer.finished(number)) is None:
                measured = measurement.measure_batch(batches[number])
                writer.write(number, measured.generations, measured.timings)
            else:
                measured = measurement.take_over(kept)
                tally.num_resumed += len(batches[number])
            tally.add(measured.generations, measured.timings)
            advance(len(batches[number]))
    shares = gather_object([(tallies, writer.spans)])
    return _put_together(shares, turns, Path(config.output)) if state.is_main_process else None


def _put_together(
    shares: Sequence[tuple[dict[str, Tally], Sequence[RecordSpan]]], turns: Turns, output: Path
) -> dict[str, Tally]:
    """Merge the processes' tallies and record files, in the order of the prompts."""
    join_parts(output, [span for _, spans in shares for span in spans])
    (whole, _), *others = shares
    for suite, tally in whole.items():
        for other, _ in others:
            tally.merge(other[suite])
        tally.sort([request.prompt_id for request in turns.first])
    if turns.first and not any(tally.timings for tally in whole.values()):
        raise RunFailed("not one batch could be decoded in every mode; what went wrong is in the log above")
    return whole

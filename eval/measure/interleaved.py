"""Decoding in turns: each batch plainly, with the draft and with the free baselines, repeat by repeat, turn by turn.

All ways go through the same decoder on the same text and count the same token ids. They alternate (plain, draft, baselines,
plain, ...) so that a machine whose speed drifts drifts for all of them. A batch in which the machine gives up in any of them
fails as a whole in that one, is listed, and is timed in none.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from configs.runtime.progress import progress
from configs.schema.evaluation import EvalConfig
from eval.decoder.decode import Request, decode
from eval.decoder.meters import Meter
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Generation, Timing
from eval.measure.turns import undecoded
from heads.proposers.protocol import Learner, Proposer
from heads.target.loading import Target

log = logging.getLogger("draftsmith")

Follow = Callable[[Iterable[Generation]], tuple[list[Request], list[Generation]]]


@dataclass
class Records:
    """Everything that was measured."""

    generations: list[Generation] = field(default_factory=list)  # of the first repeat
    timings: list[Timing] = field(default_factory=list)

    def of(self, mode: str) -> list[Generation]:
        """Return one mode's generations in the order of the prompts."""
        return [generation for generation in self.generations if generation.mode == mode]


def measure(
    target: Target,
    requests: Sequence[Request],
    config: EvalConfig,
    proposers: Mapping[str, Proposer],
    *,
    follow: Follow | None = None,
) -> Records:
    """Decode requests plainly and with each proposer; see `Measurement`."""
    measurement = Measurement(target, config, proposers, follow)
    batches = in_batches(requests, config.decode.batch_size)
    records = Records()
    measurement.warm_up(batches)
    with progress("decoding", len(requests), "prompts") as advance:
        for batch in batches:
            measured = measurement.measure_batch(batch)
            records.generations += measured.generations
            records.timings += measured.timings
            advance(len(batch))
    return records


def in_batches(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    """Cut requests into batches of at most `size`, in order."""
    return [requests[start : start + size] for start in range(0, len(requests), size)]


class Measurement:
    """Decodes batches in every mode.

    Args:
        target: the target.
        config: `decode`, `repeats` and `warmup_prompts` are read.
        proposers: by mode; plain decoding comes before them.
        follow: takes the plain answers to a turn and gives the requests of the next, and what is lost (`eval.measure.turns`);
            None
            where prompts have one turn.
        meter: measures the energy of what is timed (`eval.decoder.meters`).
    """

    def __init__(
        self,
        target: Target,
        config: EvalConfig,
        proposers: Mapping[str, Proposer],
        follow: Follow | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.target, self.config, self.follow, self.meter = target, config, follow, meter
        self.modes: dict[str, Proposer | None] = {AUTOREGRESSIVE: None, **proposers}
        # The free baselines draft chains to their full length and are lossless, whatever is asked for of the draft.
        chains = config.decode.model_copy(update={"tree": None, "stopping": None, "lossy": None})
        self.settings = {mode: config.decode if mode == SPECULATIVE else chains for mode in self.modes}

    def warm_up(self, batches: Sequence[Sequence[Request]]) -> None:
        """Decode the first `config.warmup_prompts` prompts in every mode: whole batches, whose shapes are those timed.

        Raises:
            RuntimeError: the machine cannot; nothing has been measured yet, so that this is no failed request.
        """
        count = math.ceil(self.config.warmup_prompts / self.config.decode.batch_size)
        for batch, (mode, proposer) in itertools.product(batches[:count], self.modes.items()):
            decode(self.target, batch, self.settings[mode], proposer)

    def measure_batch(self, batch: Sequence[Request]) -> Records:
        """Decode all turns of a batch, each in every mode, `config.repeats` times."""
        records = Records()
        while batch:
            turn = self._measure_turn(batch)
            records.generations += turn.generations
            records.timings += turn.timings
            if self.follow is None:
                break
            batch, lost = self.follow(turn.of(AUTOREGRESSIVE))
            records.generations += [replace(each, mode=mode) for mode in self.modes for each in lost]
        return records

    def _measure_turn(self, batch: Sequence[Request]) -> Records:
        records, gave_up = Records(), set()
        for repeat, mode in itertools.product(range(self.config.repeats), self.modes):
            try:
                generations, timing = decode(
                    self.target,
                    batch,
                    self.settings[mode],
                    self.modes[mode],
                    mode=mode,
                    repeat=repeat,
                    measure_overlap=repeat == 0 and mode == SPECULATIVE,
                    meter=self.meter,
                    simulate_acceptance=self.config.simulate_acceptance if mode == SPECULATIVE else None,
                )
            except RuntimeError:  # what torch raises where memory runs out or a kernel fails
                log.exception("%s decoding of the batch of prompt %s failed", mode, batch[0].prompt_id)
                gave_up.add(mode)
                continue
            records.timings.append(timing)
            records.generations += generations if repeat == 0 else []
        self._teach(records)
        return _without(records, gave_up, batch) if gave_up else records

    def _teach(self, records: Records) -> None:
        """Tell drafts with a memory the answers they drafted for, now that no repeat can copy them."""
        for mode, proposer in self.modes.items():
            if isinstance(proposer, Learner):
                for generation in records.of(mode):
                    proposer.learn(generation.tokens)


def _without(records: Records, modes: Collection[str], batch: Sequence[Request]) -> Records:
    """Count a batch as failed in some modes, and as timed in none: one side alone says nothing about the other."""
    decoded = [generation for generation in records.generations if generation.mode not in modes]
    return Records([*decoded, *(undecoded(request, mode, "error") for mode in sorted(modes) for request in batch)])

"""Interleaved measurement: each batch is decoded plainly, with the draft and with the baselines, repeat by repeat.

All modes use the same decoder on the same text and count the same token ids. They alternate (plain, draft, baselines, plain,
...) so that a drift of the machine's speed affects all of them alike. What is timed is not measured otherwise: the draft's
distributions, and energy, are looked at in a pass of their own, which must give the same tokens. A batch that raises in one
mode has failed in that mode and is timed in none.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from configs.runtime.terminal import progress
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LOOKUPS, EvalConfig
from eval.decoder.decode import Request, decode
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, WITH_LOOKUP, Generation, Timing
from eval.measure.turns import undecoded
from eval.metrics.energy import Meter, MeteredClock
from heads.frozen.loading import Target
from heads.proposers.protocol import LearningProposer, Proposer

log = logging.getLogger("draftsmith")

Follow = Callable[[Iterable[Generation]], tuple[list[Request], list[Generation]]]


@dataclass
class Records:
    """The generations and timings of a measurement."""

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
    settings: Mapping[str, DecodeConfig] | None = None,
) -> Records:
    """Decode requests plainly and with each proposer, those that `settings` names by these; see `Measurement`."""
    measurement = Measurement(target, config, proposers, follow)
    measurement.settings |= settings or {}
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
        follow: takes the plain answers to a turn and returns the requests of the next, and the lost turns
            (`eval.measure.turns`); None where prompts have one turn.
        meter: measures the energy of what is timed (`eval.metrics.energy`); None: it is not measured.
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
        # The baselines draft chains to their full length and without loss, whatever the draft under evaluation does.
        chains = config.decode.model_copy(update={"tree": None, "stopping": None, "lossy": None})
        lookups = chains.model_copy(update={"num_speculative_tokens": config.lookup_length})
        self.settings = {
            mode: config.decode if mode in (SPECULATIVE, WITH_LOOKUP) else lookups if mode in LOOKUPS else chains
            for mode in self.modes
        }

    def warm_up(self, batches: Sequence[Sequence[Request]]) -> None:
        """Decode the first `config.warmup_prompts` prompts in every mode: whole batches, whose shapes are those timed.

        Raises:
            RuntimeError: decoding raised, for instance for want of memory.
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

    def take_over(self, records: Iterable[Generation | Timing]) -> Records:
        """Return the records of a batch that an earlier run measured; drafts with a memory learn from them as they did then."""
        taken = Records()
        for each in records:
            if isinstance(each, Generation):
                taken.generations.append(each)
            else:
                taken.timings.append(each)
        self._teach(taken)
        return taken

    def _measure_turn(self, batch: Sequence[Request]) -> Records:
        records, gave_up = Records(), set()
        for repeat, mode in itertools.product(range(self.config.repeats), self.modes):
            try:
                generations, timing = self._decode(batch, mode, repeat)
            except RuntimeError:  # raised by torch where memory runs out or a kernel fails
                if self.target.group is not None:
                    raise  # the others that share the target are in the middle of that forward
                log.exception("%s decoding of the batch of prompt %s failed", mode, batch[0].prompt_id)
                gave_up.add(mode)
                continue
            records.timings.append(timing)
            records.generations += generations if repeat == 0 else []
        if not gave_up:
            self._look_closer(batch, records)
        self._teach(records)
        return _without(records, gave_up, batch) if gave_up else records

    def _look_closer(self, batch: Sequence[Request], records: Records) -> None:
        """Decode once more, untimed: the draft, whose distributions are compared with the target's, or metered in all modes."""
        for mode in self.modes if self.meter is not None else [mode for mode in self.modes if mode == SPECULATIVE]:
            generations, measured = self._decode(batch, mode, 0, closely=True)
            places = [place for place, each in enumerate(records.generations) if each.mode == mode]
            for place, seen in zip(places, generations, strict=True):
                if seen.tokens == records.generations[place].tokens:
                    records.generations[place] = seen
                else:  # the device's kernels do not repeat themselves to the bit
                    log.warning("%s decoding of prompt %s gave other tokens when it was measured", mode, seen.prompt_id)
            for place, timing in enumerate(records.timings):
                if timing.mode == mode:
                    once = measured.measure_seconds if timing.repeat == 0 else 0.0
                    records.timings[place] = replace(timing, measure_seconds=once, decode_joules=measured.decode_joules)

    def _decode(
        self, batch: Sequence[Request], mode: str, repeat: int, *, closely: bool = False
    ) -> tuple[list[Generation], Timing]:
        clock = MeteredClock(self.target.device, self.meter) if self.meter is not None and closely else None
        generations, timing = decode(
            self.target,
            batch,
            self.settings[mode],
            self.modes[mode],
            mode=mode,
            repeat=repeat,
            measure_overlap=closely and mode == SPECULATIVE,
            clock=clock,
        )
        return generations, timing if clock is None else replace(timing, decode_joules=clock.decode_joules)

    def _teach(self, records: Records) -> None:
        """Give drafts with a memory the answers they drafted for, after the last repeat, so that none can copy them."""
        for mode, proposer in self.modes.items():
            if isinstance(proposer, LearningProposer):
                for generation in records.of(mode):
                    proposer.learn(generation.tokens)


def _without(records: Records, modes: Collection[str], batch: Sequence[Request]) -> Records:
    """Mark a batch as failed in some modes and drop its timings, since the modes are compared batch by batch."""
    decoded = [generation for generation in records.generations if generation.mode not in modes]
    return Records([*decoded, *(undecoded(request, mode, "error") for mode in sorted(modes) for request in batch)])

"""Interleaved measurement: each batch is decoded plainly, with the draft and with the baselines, repeat by repeat.

All modes use the same decoder on the same text and count the same token ids. They alternate, in the reverse order every other
time, so that a drift of the machine's speed affects all of them alike. What is timed is not measured otherwise: the draft's
distributions are compared with the target's in a pass of their own, which must give the same tokens. The processes of
`accelerate launch` share batches that are cut from the prompts of each suite before, so that the same rows are decoded together
however many processes there are.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from configs.runtime.errors import RunFailed
from configs.runtime.terminal import progress
from configs.schema.evaluation import EvalConfig, FreeDraft
from distill.dataset.conversations import check_written_for, first_answers
from distill.generation.prompts import Prompt
from eval.acceptance import Tally
from eval.decoder.decode import Request, decode
from eval.decoder.records import (
    AUTOREGRESSIVE,
    OTHER_RULE,
    SPECULATIVE,
    WITH_LOOKUP,
    BatchFiles,
    Generation,
    Records,
    Timing,
)
from eval.measure.suite import Turns
from eval.speed import Meter
from heads.artifact import Draft, load_draft
from heads.frozen.identity import TargetIdentity
from heads.frozen.loading import Target
from heads.frozen.processes import share_of
from heads.metadata import agreed, hash_together
from heads.proposers.lookup import LookupFirst, MergedDrafts, PromptLookup, SuffixLookup
from heads.proposers.protocol import LearningProposer, Proposer
from heads.proposers.suffixes import KNOWN_TOKENS

log = logging.getLogger("draftsmith")

Answers = Sequence[Sequence[int]]  # token ids
Item = TypeVar("Item")
Way = TypeVar("Way")
# Takes the plain answers to a turn and returns the requests of the next, and the lost turns (`Turns.follow`).
Follow = Callable[[Iterable[Generation]], tuple[list[Request], list[Generation]]]


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
    """Decode this process's share of the prompts; return what all processes measured, by suite, in the main one.

    The others have None, but where processes share the target, all have it. Writes `records.jsonl` into `config.output`, and
    leaves there what a run with the same `job` resumes from (`eval.decoder.records.drop_batches`).
    """
    by_suite = [list(requests) for _, requests in itertools.groupby(turns.first, key=lambda request: request.suite)]
    batches = [batch for requests in by_suite for batch in in_batches(requests, config.decode.batch_size)]
    share = share_of(target.group, state)
    mine = range(share.number, len(batches), share.count)
    measurement = Measurement(target, config, proposers, turns.follow, meter)
    drafts = drafts_by_mode(config)
    tallies = {requests[0].suite: Tally(config.decode.num_speculative_tokens, drafts) for requests in by_suite}
    (job,) = broadcast_object_list([job])  # the machines of several processes may differ
    files = BatchFiles(Path(config.output), job)
    (finished,) = broadcast_object_list([files.finished(len(batches)) if state.is_main_process else None])
    measurement.warm_up([batches[number] for number in mine])
    sizes = {number: len(batches[number]) for number in mine}
    with progress(
        "decoding", sum(sizes.values()), "prompts", done=sum(sizes[number] for number in mine if number in finished)
    ) as advance:
        for number in mine:
            if number in finished:
                measurement.teach(files.read(number))
                continue
            records = measurement.measure_batch(batches[number], place=number // share.count)
            if share.writes:
                files.write(number, records)
            advance(sizes[number])
    state.wait_for_everyone()  # every batch is on disk
    if state.is_main_process:
        files.join(len(batches))
    elif target.group is None:
        return None
    for number, batch in enumerate(batches):
        records, tally = files.read(number), tallies[batch[0].suite]
        tally.add(records.generations, records.timings)
        tally.num_resumed += len(batch) if number in finished else 0
    if turns.first and not any(tally.timings for tally in tallies.values()):
        raise RunFailed("not one batch could be decoded in every mode; what went wrong is in the log above")
    return tallies


def in_batches(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    """Cut requests into batches of at most `size`, in order."""
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def time_ways(items: Sequence[Item], ways: Mapping[Way, Callable[[Item], Sequence[float]]]) -> dict[Way, float]:
    """Run each item in every way, in turns; return each way's seconds over what it made, the first two numbers of a run.

    The order of the ways is reversed every other item. The first item comes once more before: the first time, in which a
    forward may be compiled, is not counted.
    """
    seconds, counts = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    for number, item in enumerate([*items[:1], *items]):
        for way in list(ways)[:: -1 if number % 2 else 1]:
            took, count, *_ = ways[way](item)
            if number > 0:
                seconds[way] += took
                counts[way] += count
    return {way: seconds[way] / max(counts[way], 1) for way in ways}


def drafts_by_mode(config: EvalConfig) -> dict[str, int]:
    """Return how many drafts a round has at most, in the modes where that is not `decode.num_speculative_tokens`."""
    return {
        "prompt_lookup": config.lookup_num_speculative_tokens,
        "suffix_lookup": config.suffix_length,
        WITH_LOOKUP: config.suffix_length,
    }


class Measurement:
    """Decodes batches in every mode; a meter is read before and after each decode."""

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
        ways = {SPECULATIVE: config.decode, WITH_LOOKUP: config.decode, OTHER_RULE: config.decode.otherwise}
        drafts = drafts_by_mode(config)
        self.settings = {
            mode: ways.get(mode, chains).model_copy(
                update={"num_speculative_tokens": drafts.get(mode, config.decode.num_speculative_tokens)}
            )
            for mode in self.modes
        }

    def warm_up(self, batches: Sequence[Sequence[Request]]) -> None:
        """Decode the first `config.warmup_prompts` prompts in every mode: whole batches, whose shapes are those timed."""
        count = math.ceil(self.config.warmup_prompts / self.config.decode.batch_size)
        for batch, (mode, proposer) in itertools.product(batches[:count], self.modes.items()):
            decode(self.target, batch, self.settings[mode], proposer)

    def measure_batch(self, batch: Sequence[Request], place: int = 0) -> Records:
        """Decode all turns of a batch, this process's `place`-th, each in every mode, `config.repeats` times."""
        records = Records()
        while batch:
            turn = self._measure_turn(batch, place)
            records.extend(turn)
            if self.follow is None:
                break
            batch, lost = self.follow(turn.of(AUTOREGRESSIVE))
            records.generations += [replace(each, mode=mode) for mode in self.modes for each in lost]
        return records

    def teach(self, records: Records) -> None:
        """Give drafts with a memory the answers they drafted for, after the last repeat, so that none can copy them."""
        for mode, proposer in self.modes.items():
            if isinstance(proposer, LearningProposer):
                for generation in records.of(mode):
                    proposer.learn(generation.tokens)

    def _measure_turn(self, batch: Sequence[Request], place: int) -> Records:
        """Decode in every mode by turns, whose order is that of `modes` where `place` and repeat sum to an even number."""
        records, modes = Records(), list(self.modes)
        failed: set[str] = set()
        for repeat, number in itertools.product(range(self.config.repeats), range(len(modes))):
            mode = modes[-1 - number if (place + repeat) % 2 else number]
            try:
                generations, timing = self._decode(batch, mode, repeat)
            except RuntimeError:  # raised by torch where memory runs out or a kernel fails
                if self.target.group is not None:
                    raise  # the others that share the target are in the middle of that forward
                log.exception("%s decoding of the batch of prompt %s failed", mode, batch[0].prompt_id)
                failed.add(mode)
                continue
            records.timings.append(timing)
            records.generations += generations if repeat == 0 else []
        records.generations.sort(key=lambda each: modes.index(each.mode))
        for mode in modes if not failed else ():
            self._measure_untimed(batch, mode, records)
        self.teach(records)
        if not failed:
            return records
        # The modes are compared batch by batch: what failed in one is timed in none.
        decoded = [generation for generation in records.generations if generation.mode not in failed]
        return Records([*decoded, *(request.answered(mode, "error") for mode in sorted(failed) for request in batch)])

    def _measure_untimed(self, batch: Sequence[Request], mode: str, records: Records) -> None:
        """Decode once more where the draft drafts alone, untimed, to compare its distributions; a tree has none."""
        if mode not in (SPECULATIVE, OTHER_RULE) or self.settings[mode].tree is not None:
            return
        again = iter(self._decode(batch, mode, 0, measure_overlap=True)[0])
        for number, each in enumerate(records.generations):
            if each.mode != mode:
                continue
            if (measured := next(again)).tokens == each.tokens:
                records.generations[number] = measured
            else:  # the device's kernels do not repeat themselves to the bit
                log.warning("prompt %s was given other tokens when its drafts were measured", each.prompt_id)

    def _decode(
        self, batch: Sequence[Request], mode: str, repeat: int, *, measure_overlap: bool = False
    ) -> tuple[list[Generation], Timing]:
        before = 0.0 if self.meter is None else self.meter()
        way = self.settings[mode], self.modes[mode]
        generations, timing = decode(self.target, batch, *way, mode=mode, repeat=repeat, measure_overlap=measure_overlap)
        return generations, timing if self.meter is None else replace(timing, joules=self.meter() - before)


# --- what is measured: the draft under evaluation, which may be several artifacts merged into one tree, and the baselines ---


@dataclass(frozen=True, kw_only=True)
class EvaluatedDraft:
    """The draft under evaluation."""

    paths: tuple[str, ...]  # the artifact folders
    parts: tuple[Draft, ...]
    proposer: Proposer  # the one part's, or all of them as one

    @property
    def warnings(self) -> list[str]:
        return [warning for part in self.parts for warning in part.warnings]

    @property
    def section(self) -> dict[str, Any]:
        """The report's draft section. Several parts are listed under `parts`; their hash is that of all hashes in order."""
        each = [
            {
                "kind": part.metadata.kind,
                "path": path,
                "sha256": part.sha256,
                "num_parameters": part.num_parameters,
                "target_sha256": part.metadata.target["weights_sha256"],
            }
            for path, part in zip(self.paths, self.parts, strict=True)
        ]
        if len(each) == 1:
            return each[0]
        return {
            "kind": "merged",
            "path": " + ".join(self.paths),
            "sha256": hash_together([part["sha256"] for part in each]),
            "num_parameters": sum(part["num_parameters"] for part in each),
            "target_sha256": agreed(part["target_sha256"] for part in each),
            "parts": each,
        }


def load_evaluated(config: EvalConfig, target: Target) -> EvaluatedDraft:
    """Load the artifacts that `config.draft` names, for a target."""
    allowed, device = config.allow_target_mismatch, config.draft_device
    parts = tuple(
        load_draft(path, target.identity, target.model, allow_target_mismatch=allowed, device=device) for path in config.drafts
    )
    proposers = [part.proposer for part in parts]
    proposer = proposers[0] if len(proposers) == 1 else MergedDrafts(proposers, target.device)
    return EvaluatedDraft(paths=tuple(config.drafts), parts=parts, proposer=proposer)


def add_lookup(draft: Proposer, config: EvalConfig, target: Target, answers: Answers = ()) -> Proposer:
    """Return suffix lookup before the draft, round by round; the draft may not decode by itself at the same time.

    It decodes with `config.suffix_length` as `num_speculative_tokens`; the draft makes those of `config.decode` at most.
    """
    lookup = SuffixLookup(target.device, answers, min_expected=config.lookup_must_expect)
    return LookupFirst(lookup, draft, target.vocab_size, num_drafts=config.decode.num_speculative_tokens)


def make_baselines(config: EvalConfig, target: Target, answers: Answers = ()) -> dict[str, Proposer]:
    """Return the proposers that `baselines` names, in its order."""
    makers: dict[FreeDraft, Callable[[], Proposer]] = {
        "prompt_lookup": lambda: PromptLookup(target.device),
        "suffix_lookup": lambda: SuffixLookup(target.device, answers),
    }
    return {name: makers[name]() for name in config.baselines}


def known_answers(config: EvalConfig, prompts: Sequence[Prompt], identity: TargetIdentity) -> Answers:
    """Return the first answers of `lookup_answers`, `KNOWN_TOKENS` at most, but those to prompts of the suites."""
    if config.lookup_answers is None:
        return []
    path = Path(config.lookup_answers)
    check_written_for(path, identity)
    known = first_answers(path, KNOWN_TOKENS, [text for prompt in prompts for text in prompt.user_texts])
    log.info("suffix lookup knows %d answers of %s", len(known), path)
    return known

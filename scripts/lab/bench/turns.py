"""What benchmarks compare by: sides that take turns, their ratios, and held-out prompts that chose nothing.

A time belongs to the machine and the minute it was measured in; a ratio of two sides that took turns in one run also means
something elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from configs.runtime.errors import InputError
from configs.runtime.terminal import progress
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import EvalConfig
from distill.dataset.conversations import Conversation, Message, read_conversations
from eval.decoder.decode import Request
from eval.decoder.records import Generation, Timing
from eval.measure.interleaved import Follow, Measurement, in_batches
from eval.measure.record_files import Records
from eval.metrics.speed import compare_speed
from eval.stats.bootstrap import Interval, paired_ratio_interval
from heads.frozen.loading import Target
from heads.frozen.tokenizer import in_template
from heads.proposers.protocol import Proposer
from scripts.lab.measuring import SEED, decode_in_batches, to_request

C = TypeVar("C")
R = TypeVar("R")


@dataclass(frozen=True)
class Turn(Generic[R]):
    result: R
    seconds: float


SideTurns = list[list[Turn[R]]]  # of one side, by case and repeat


def take_turns(
    sides: Mapping[str, Callable[[C, int], R]],
    cases: Sequence[C],
    repeats: int,
    *,
    description: str,
    unit: str = "prompts",
    warm_up: bool = True,
) -> dict[str, SideTurns[R]]:
    """Time every side on every case, every second time in reverse order, so that drift in speed affects all alike."""
    if warm_up:
        for side in sides.values():
            side(cases[0], 0)
    names = list(sides)
    turns: dict[str, SideTurns[R]] = {name: [[] for _ in cases] for name in sides}
    with progress(description, len(cases), unit) as advance:
        for number, case in enumerate(cases):
            order = [(repeat, name) for repeat in range(repeats) for name in names[:: -1 if (number + repeat) % 2 else 1]]
            for repeat, name in order:
                started = time.perf_counter()
                result = sides[name](case, repeat)
                turns[name][number].append(Turn(result, time.perf_counter() - started))
            advance(1)
    return turns


def speed_ratio(ours: SideTurns[R], theirs: SideTurns[R], amount: Callable[[R], float], *, samples: int) -> Interval:
    """Return our amount a second over theirs; the bootstrap draws cases, whose repeats are summed: no independent evidence."""
    if list(map(len, ours)) != list(map(len, theirs)):
        raise ValueError("the two sides did not do the same cases equally often")
    columns = [
        [sum(value(turn) for turn in turns) for turns in side]
        for side, value in (
            (theirs, lambda turn: turn.seconds),
            (theirs, lambda turn: amount(turn.result)),
            (ours, lambda turn: turn.seconds),
            (ours, lambda turn: amount(turn.result)),
        )
    ]
    return paired_ratio_interval(*columns, samples=samples, seed=SEED)


def speedup(timings: Sequence[Timing], mode: str, *, samples: int) -> Interval:
    """Return how many times plain decoding's speed a mode had, the prompts' forwards left out."""
    found = compare_speed(timings, mode, samples=samples, seed=SEED)
    return Interval(found["decode_speedup"], *(found["decode_speedup_ci"] or ()))


def pooled_rate(cases: SideTurns[R], amount: Callable[[R], float]) -> float:
    turns = [turn for repeats in cases for turn in repeats]
    return sum(amount(turn.result) for turn in turns) / sum(turn.seconds for turn in turns)


def measured_rows(path: Path, num_prompts: int, num_choosing: int, sources: Sequence[str] = ()) -> list[Conversation]:
    """Return the conversations of the last prompts of a held-out file, as many of each source; none chose a checkpoint."""
    rows = read_conversations(path)
    choosing = {row.prompt_id for row in rows[:num_choosing]}
    others = list(dict.fromkeys(row.prompt_id for row in rows if row.prompt_id not in choosing))
    measured: set[str] = set()
    names = list(sources) or [""]
    for number, source in enumerate(names):
        share = (num_prompts + number) // len(names)
        of_source = [name for name in others if not source or name.startswith(f"{source}/")]
        if len(of_source) < share:
            of = f" of source {source}" if source else ""
            raise InputError(
                f"num_prompts: {path} has {len(of_source)} prompts{of} beside the {len(choosing)} that choose checkpoints, got "
                f"{share}; ask for fewer, or give held_out.num_prompts of the recipe a smaller number"
            )
        measured |= set(of_source[len(of_source) - share :])
    return [row for row in rows if row.prompt_id in measured]


def count_rounds(
    target: Target, requests: Sequence[Request], settings: DecodeConfig, proposer: Proposer, *, what: str
) -> dict[str, list[int]]:
    """Decode prompts in batches of `settings.batch_size`; return `{prompt id: [committed tokens, rounds]}`."""
    return count_per_prompt(decode_in_batches(target, requests, settings, proposer, what=what))


def count_per_prompt(generations: Iterable[Generation]) -> dict[str, list[int]]:
    """Return `{prompt id: [committed tokens, rounds]}`, summed over turns."""
    counts: dict[str, list[int]] = {}
    for generation in generations:
        own = counts.setdefault(generation.prompt_id, [0, 0])
        own[0] += generation.num_committed
        own[1] += len(generation.rounds)
    return counts


def first_turns(rows: Sequence[Conversation]) -> list[Conversation]:
    """Return the first turn of each conversation: turns of one are not independent samples."""
    return list(reversed({row.prompt_id: row for row in reversed(rows)}.values()))


def first_requests(rows: Sequence[Conversation]) -> list[Request]:
    """Return the first turns of conversations as the decoder takes them."""
    return list(map(to_request, first_turns(rows)))


def after_messages(target: Target, row: Conversation, before: Sequence[Message]) -> Request:
    """Return a conversation's prompt after these messages."""
    ids = target.encode_chat([*before, *row.messages[:-1]], tools=row.tools)
    return replace(to_request(row), tokens=tuple(ids))


def in_chat_template(target: Target, row: Conversation, template: str) -> Request:
    """Return a conversation's prompt in another chat template than the target's."""
    text = in_template(target.tokenizer, target.identity.name, row.messages[:-1], tools=row.tools, template=template)
    return replace(to_request(row), tokens=tuple(target.tokenizer(text, add_special_tokens=False)["input_ids"]))


def in_long_chat(target: Target, row: Conversation, others: Sequence[Conversation], length: int) -> Request:
    """Return a conversation's prompt at the end of a chat of at most `length` tokens, of exchanges from other conversations."""
    before: list[Message] = []
    left = length - len(row.prompt_ids)
    for other in others:
        tokens = len(other.prompt_ids) + len(other.answer_ids)  # with the system message of the template, or none: no fewer
        if other.prompt_id != row.prompt_id and tokens <= left:
            before, left = [*before, *other.messages], left - tokens
    return after_messages(target, row, before)


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
            records.extend(measurement.measure_batch(batch))
            advance(len(batch))
    return records

"""What benchmarks share: sides that take turns, ratios with intervals, fresh processes, held-out prompts, the results file.

A time belongs to the machine and the minute it was measured in; a ratio of two sides that took turns in one run also means
something elsewhere. So `ratios` of a results file holds only the latter, ours against the other.
"""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from configs.runtime.errors import InputError
from configs.runtime.files import read_json, write_json
from configs.runtime.progress import progress
from configs.runtime.redaction import mask_arguments, mask_secrets
from configs.schema.data import shares_of
from configs.schema.decoding import DecodeConfig
from distill.dataset.conversations import Conversation, read_conversations
from eval.decoder.decode import Request, decode
from eval.decoder.records import Generation, Timing
from eval.metrics.acceptance import count_per_prompt
from eval.metrics.speed import compare_speed
from eval.stats.bootstrap import Interval, paired_ratio_interval
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposer
from scripts.lab.bench.provenance import check_place, check_same_origin, describe_origin, is_published

log = logging.getLogger("draftsmith")

SEED = 0  # of all resampling

C = TypeVar("C")
R = TypeVar("R")


@dataclass(frozen=True)
class Turn(Generic[R]):
    """What one side made of one case, and the wall-clock seconds it took."""

    result: R
    seconds: float


Counts = Sequence[tuple[int, int]]  # by prompt: committed tokens and rounds
SideTurns = list[list[Turn[R]]]  # of one side, by case and repeat


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """One optimiser step of a side: tokens of the batch without padding, and the loss before it, per label."""

    num_tokens: int
    loss: float


def take_turns(
    sides: Mapping[str, Callable[[C, int], R]],
    cases: Sequence[C],
    repeats: int,
    *,
    description: str,
    unit: str = "prompts",
    warm_up: bool = True,
) -> dict[str, SideTurns[R]]:
    """Run every side on every case `repeats` times, and time each run.

    The sides alternate on each case, so that drift in the machine's speed affects all of them alike, and every second time
    they do so in reverse order, so that no side always runs after the same other one.

    Args:
        sides: called with a case and the number of the repeat; a side returns when its work is done, on a GPU as well.
        cases: what they work on, e.g. prompts; at least one.
        repeats: timed runs of each side on each case.
        description, unit: for the progress bar.
        warm_up: whether each side first does the first case once, untimed; not needed by sides that start processes.
    """
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
    """Return our amount a second over theirs, pooled, with its interval; above 1 we are faster.

    Args:
        ours, theirs: of the same cases in the same order. The case is what the bootstrap draws; its repeats are summed, being
            no independent evidence.
        amount: how much a result is, e.g. its number of tokens.
        samples: of the bootstrap.

    Raises:
        ValueError: the sides did not do the same cases equally often.
    """
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


def columns(counts: Counts) -> tuple[list[float], list[float]]:
    """Return committed tokens and rounds by prompt, as intervals take them."""
    return [float(committed) for committed, _ in counts], [float(rounds) for _, rounds in counts]


def pooled_rate(cases: SideTurns[R], amount: Callable[[R], float]) -> float:
    """Return a side's amount a second, pooled over cases and repeats."""
    turns = [turn for repeats in cases for turn in repeats]
    return sum(amount(turn.result) for turn in turns) / sum(turn.seconds for turn in turns)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with each interval as `{name: point, name_low: ..., name_high: ...}`, its bounds None without any."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Interval):
            found |= {name: value.point, f"{name}_low": value.low, f"{name}_high": value.high}
        else:
            found[name] = value
    return found


def write_results(
    path: str | Path,
    name: str,
    config: BaseModel,
    *,
    rows: Sequence[Mapping[str, Any]],
    ratios: Mapping[str, Interval | float | None],
    script: str = "scripts/lab/benchmark.py",
    **extra: Any,
) -> None:
    """Write a benchmark's results file.

    Args:
        path: where to, e.g. `docs/results/decode.json`.
        name: of the benchmark.
        config: the resolved config.
        rows: flat objects, for a table of those with the same keys; intervals become three of them.
        ratios: ours against the other, from sides that took turns.
        script: the command that ran, to which the process's own arguments are added.
        extra: further JSON values, kept under their names.

    Raises:
        InputError: the path is in docs/results, and code was changed while this ran; the file is then in `runs/`.
    """
    value = {
        "name": name,
        "command": shlex.join(["python", script, *mask_arguments(sys.argv[1:])]),
        "config": mask_secrets(config.model_dump(mode="json")),
        **describe_origin(),
        "rows": [flat(row) for row in rows],
        "ratios": flat(ratios),
        **extra,
    }
    try:
        check_place(path)
    except InputError as error:
        path = Path("runs") / Path(path).name
        write_json(path, value)
        raise InputError(f"{error}; the results are in {path}") from error
    write_json(Path(path), value)
    log.info("results in %s", path)


def add_ratios(
    path: str | Path, name: str, config: BaseModel, ratios: Mapping[str, Interval | float | None], **extra: Any
) -> None:
    """Add ratios to a results file that another benchmark wrote, and under `name` how they were measured and what else is said.

    Raises:
        InputError: there is no such file, or, in docs/results, it is of another machine or other code.
    """
    value = read_json(Path(path), "results file")
    if is_published(path):
        check_same_origin(value, path)
    value["ratios"] |= flat(ratios)
    value[name] = {
        "command": shlex.join(["python", "scripts/lab/benchmark.py", *mask_arguments(sys.argv[1:])]),
        "config": mask_secrets(config.model_dump(mode="json")),
        **extra,
    }
    write_json(Path(path), value)
    log.info("results in %s", path)


# --- processes and memory -------------------------------------------------------------------------------------------


def in_fresh_process(work: Callable[..., R], *arguments: Any) -> R:
    """Return what `work` does in a new process, which inherits neither memory nor a peak from this one."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def measure_growth(work: Callable[[], R]) -> tuple[R, int]:
    """Run `work`; return its result, and the bytes by which this process's resident memory grew at its peak.

    Raises:
        InputError: the system is not Linux, which alone lets a process reset its peak.
    """
    before = 1024 * read_kibibytes("/proc/self/status", "VmRSS")
    # Resets the peak. getrusage's ru_maxrss cannot be reset, and begins with the peak of the parent process.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    result = work()
    return result, 1024 * read_kibibytes("/proc/self/status", "VmHWM") - before


def read_kibibytes(path: str, name: str) -> int:
    """Return the number of a line `NAME:  123 kB` of one of the kernel's files.

    Raises:
        InputError: there is no such file: the system is not Linux.
    """
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise InputError(f"this benchmark reads memory from {path}, which only Linux has: {error.strerror}") from error
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# --- held-out prompts ---------------------------------------------------------------------------------------------


def measured_rows(path: Path, num_prompts: int, num_choosing: int, sources: Sequence[str] = ()) -> list[Conversation]:
    """Return the conversations, all turns, of the last prompts of a held-out file, none of which chose a checkpoint.

    Args:
        num_choosing: conversations at the file's beginning that choose checkpoints (`held_out.num_prompts` of a recipe).
        sources: of prompts (`prompts.sources`), as many of each; none: all.

    Raises:
        InputError: there are fewer.
    """
    rows = read_conversations(path)
    choosing = {row.prompt_id for row in rows[:num_choosing]}
    others = list(dict.fromkeys(row.prompt_id for row in rows if row.prompt_id not in choosing))
    measured: set[str] = set()
    for source, share in zip(sources or [""], shares_of(num_prompts, [1] * max(1, len(sources))), strict=True):
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
    generations: list[Generation] = []
    for start in range(0, len(requests), settings.batch_size):
        generations += decode(target, requests[start : start + settings.batch_size], settings, proposer)[0]
    check_finite(generations, what)
    return count_per_prompt(generations)


def check_finite(generations: Iterable[Generation], what: str) -> None:
    """Raise a RuntimeError, with the draft's name and the first prompt, where target or draft computed NaN or infinity."""
    failed = [generation.prompt_id for generation in generations if generation.stop_reason == "non_finite"]
    if failed:
        raise RuntimeError(f"{what}: the logits of target or draft are not finite on prompt {failed[0]}")


def to_request(row: Conversation) -> Request:
    """Return the prompt of a conversation as the decoder takes it."""
    return Request(prompt_id=f"{row.prompt_id}/{row.turn}", category=row.category, tokens=row.prompt_ids)


def first_requests(rows: Sequence[Conversation]) -> list[Request]:
    """Return the first turn of each conversation as the decoder takes it: turns of one are not independent samples."""
    first_turns = {row.prompt_id: row for row in reversed(rows)}
    return [to_request(row) for row in reversed(first_turns.values())]

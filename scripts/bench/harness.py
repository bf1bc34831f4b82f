"""What benchmarks share: results files of one commit, sides that take turns and their ratios, processes and memory.

A time belongs to the machine and the minute it was measured in; a ratio of two sides that took turns in one run also means
something elsewhere. `ratios` of a results file hold only those.
"""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from configs.runtime.errors import InputError
from configs.runtime.files import CHECKOUT, write_json
from configs.runtime.redaction import mask_arguments, mask_secrets
from configs.runtime.run_record import describe_git, describe_hardware, describe_versions
from configs.runtime.terminal import progress
from distill.dataset.conversations import read_conversations
from eval.decoder.decode import Request
from eval.stats import Interval, paired_ratio_interval
from scripts.run.steps import run_step

log = logging.getLogger("draftsmith")

C = TypeVar("C")
R = TypeVar("R")
RESULTS = CHECKOUT / "docs" / "results"

# --- results files ------------------------------------------------------------------------------------------------


def write_results(
    path: str | Path,
    name: str,
    *,
    rows: Iterable[Mapping[str, Any]],
    ratios: Mapping[str, Interval | float | None],
    config: BaseModel | None = None,
    **extra: Any,
) -> None:
    """Write a results file; into docs/results only from a commit's clean tree, else beside the runs."""
    git, path = describe_git(), Path(path)
    value = {
        "name": name,
        "command": shlex.join(["python", *mask_arguments(sys.orig_argv[1:])]),
        "config": None if config is None else mask_secrets(config.model_dump(mode="json")),
        "hardware": describe_hardware(),
        "versions": describe_versions(),
        "git": git,
        "rows": [flat(row) for row in rows],
        "ratios": flat(ratios),
        **extra,
    }
    if RESULTS in path.resolve().parents and git["dirty"] is not False:
        path = Path("runs") / path.name
        log.warning("docs/results is for results of a commit, and this tree is not as it was committed")
    write_json(path, value)
    log.info("results in %s", path)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with each interval as `{name: point, name_low: ..., name_high: ...}`, its bounds None without any."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Interval):
            found |= {name: value.point, f"{name}_low": value.low, f"{name}_high": value.high}
        else:
            found[name] = value
    return found


def last_prompts(path: str, number: int) -> list[Request]:
    """Return the last prompts of a file of conversations, of each the first turn: the first ones chose checkpoints."""
    rows = {row.prompt_id: row for row in reversed(read_conversations(Path(path)))}
    chosen = [*reversed(rows.values())][-number:]
    return [Request(prompt_id=row.prompt_id, category=row.category, tokens=row.prompt_ids) for row in chosen]


# --- sides that take turns ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn(Generic[R]):
    result: R
    seconds: float


SideTurns = list[list[Turn[R]]]  # of one side, by case and repeat


def take_turns(
    sides: Mapping[str, Callable[[C, int], R]], cases: Sequence[C], repeats: int, *, description: str, unit: str = "prompts"
) -> dict[str, SideTurns[R]]:
    """Time every side on every case, every second time in reverse order, so that drift in speed affects all alike."""
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


def speed_ratio(ours: SideTurns[R], theirs: SideTurns[R], amount: Callable[[R], float]) -> Interval:
    """Return our amount a second over theirs; the clusters are cases, whose repeats are summed: no independent evidence."""
    columns: list[list[float]] = []
    for side in (theirs, ours):
        columns.append([sum(turn.seconds for turn in turns) for turns in side])
        columns.append([sum(amount(turn.result) for turn in turns) for turns in side])
    return paired_ratio_interval(*columns)


# --- processes -------------------------------------------------------------------------------------------


def run_module(module: str, *arguments: str) -> None:
    """Run a command of the project in a process of its own; an error where it ends with another code than 0."""
    if code := run_step(["-m", module, *arguments]):
        raise InputError(f"{shlex.join([module, *arguments])} ended with code {code}, see above")


def run_config(module: str, output: Path, config: Mapping[str, Any]) -> None:
    """Run a command by a config, which is kept beside its output."""
    path = output.with_name(f"{output.name}.yaml")
    write_json(path, {**config, "output": str(output)})  # JSON is YAML
    run_module(module, "--config", str(path))

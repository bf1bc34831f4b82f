"""What benchmarks share: results files of one commit, prompts, reports, sides that take turns and their ratios, processes.

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
from configs.runtime.files import CHECKOUT, read_json, write_json
from configs.runtime.redaction import mask_arguments, mask_secrets
from configs.runtime.run_record import describe_git, describe_hardware, describe_versions
from configs.runtime.terminal import progress
from distill.dataset.conversations import Conversation, read_conversations
from eval.decoder.records import AUTOREGRESSIVE, Request
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


# --- prompts and reports --------------------------------------------------------------------------------------------


def held_out_rows(path: str, number: int, *, choosing: int = 0) -> list[Conversation]:
    """Return the first turns of a file's last prompts, but of those that chose checkpoints, which the first rows did."""
    rows = read_conversations(Path(path))
    seen = {row.prompt_id for row in rows[:choosing]}
    left = [row for row in rows if row.turn == 0 and row.prompt_id not in seen]
    if len(left) < number:
        raise InputError(f"num_prompts: {path} has {len(left)} prompts that chose no checkpoint")
    return left[-number:]


def requests_of(rows: Iterable[Conversation]) -> list[Request]:
    return [Request(prompt_id=row.prompt_id, category=row.category, tokens=row.prompt_ids) for row in rows]


def evaluate(output: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate a draft by `eval/run.py`; return the report."""
    run_config("eval.run", output, {**config, "overwrite": True})
    return read_json(output / "report.json", "report")


def by_suite(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {report["prompts"]["suite"]: report, **report["suites"]}


def free_ways(section: Mapping[str, Any], draft: str) -> dict[str, Mapping[str, Any]]:
    """Return what a suite's section of a report has of ways without training, and of suffix lookup before the draft."""
    ways = {name: each for name, each in section["baselines"].items() if name != AUTOREGRESSIVE}
    return ways | ({f"suffix_lookup + {draft}": section["with_lookup"]} if section["with_lookup"] else {})


def figures(acceptance: Mapping[str, Any], speed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return tau and speedup with their bounds, and the acceptance by position."""
    found: dict[str, Any] = {}
    for name, key, section in (("tau", "tokens_per_target_step", acceptance), ("speedup", "decode_speedup", speed or {})):
        low, high = section.get(f"{key}_ci") or (None, None)
        found |= {name: section.get(key), f"{name}_low": low, f"{name}_high": high}
    rates = acceptance.get("position_conditional") or []
    return found | {"alpha_by_position": " / ".join("–" if rate is None else f"{rate:.2f}" for rate in rates)}


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

"""What benchmarks share: results files of one commit, sides that take turns and their ratios, processes and memory.

A time belongs to the machine and the minute it was measured in; a ratio of two sides that took turns in one run also means
something elsewhere. `ratios` of a results file hold only those.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
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
from configs.runtime.files import CHECKOUT, write_json
from configs.runtime.redaction import mask_arguments, mask_secrets
from configs.runtime.run_record import describe_git, describe_hardware, describe_versions, output_of
from configs.runtime.terminal import progress
from eval.decoder.records import Generation
from eval.stats import Interval, paired_ratio_interval

log = logging.getLogger("draftsmith")

C = TypeVar("C")
R = TypeVar("R")
SEED = 0  # of all resampling
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
    value = {
        "name": name,
        "command": shlex.join(["python", *_started_by(), *mask_arguments(sys.argv[1:])]),
        "config": None if config is None else mask_secrets(config.model_dump(mode="json")),
        "hardware": describe_hardware(),
        "versions": describe_versions(),
        "git": describe_git(),
        "rows": [flat(row) for row in rows],
        "ratios": flat(ratios),
        **extra,
    }
    path = Path(path)
    changed = changed_files() if RESULTS in path.resolve().parents else []
    if changed:
        path = Path("runs") / path.name
        log.warning("docs/results is for results of a commit, and %s differ from it", ", ".join(changed[:5]))
    write_json(path, value)
    log.info("results in %s", path)


def _started_by() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return [sys.argv[0]] if spec is None else ["-m", spec.name.removesuffix(".__main__")]


def changed_files(root: Path = CHECKOUT) -> list[str]:
    """Return the files of a checkout, documents aside, that are not as they were committed."""
    where = ["--", ".", ":(exclude)docs", ":(exclude)README.md"]
    commands = (["diff", "--name-only", "HEAD"], ["ls-files", "--others", "--exclude-standard"])
    listed = [output_of(["git", "-C", str(root), *command, *where]) for command in commands]
    return ["no git checkout"] if None in listed else [path for each in listed for path in (each or "").splitlines()]


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with each interval as `{name: point, name_low: ..., name_high: ...}`, its bounds None without any."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Interval):
            found |= {name: value.point, f"{name}_low": value.low, f"{name}_high": value.high}
        else:
            found[name] = value
    return found


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


def speed_ratio(ours: SideTurns[R], theirs: SideTurns[R], amount: Callable[[R], float], *, samples: int) -> Interval:
    """Return our amount a second over theirs; the bootstrap draws cases, whose repeats are summed: no independent evidence."""
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


def count_per_prompt(generations: Iterable[Generation]) -> dict[str, tuple[int, int]]:
    """Return `{prompt id: (committed tokens, rounds)}`, summed over turns and repeats."""
    counts: dict[str, tuple[int, int]] = {}
    for each in generations:
        committed, rounds = counts.get(each.prompt_id, (0, 0))
        counts[each.prompt_id] = committed + each.num_committed, rounds + len(each.rounds)
    return counts


# --- processes and memory -------------------------------------------------------------------------------------------


def run_module(module: str, *arguments: str) -> None:
    """Run a command of the project in a process of its own; an error where it ends with another code than 0."""
    command = [sys.executable, "-m", module, *arguments]
    code = subprocess.run(command, cwd=CHECKOUT, env=os.environ, check=False).returncode
    if code:
        raise InputError(f"{shlex.join(command[1:])} ended with code {code}, see above")


def run_config(module: str, output: Path, config: Mapping[str, Any]) -> None:
    """Run a command by a config, which is kept beside its output."""
    path = output.with_name(f"{output.name}.yaml")
    write_json(path, {**config, "output": str(output)})  # JSON is YAML
    run_module(module, "--config", str(path))


def in_fresh_process(work: Callable[..., R], *arguments: Any) -> R:
    """Return what `work` does in a new process, which inherits neither memory nor a peak from this one."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def measure_growth(work: Callable[[], R]) -> tuple[R, int]:
    """Run `work`; return its result, and the bytes by which this process's resident memory grew at its peak. Linux only."""
    before = read_kibibytes("VmRSS")
    # Resets the peak. getrusage's ru_maxrss cannot be reset, and begins with the peak of the parent process.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    result = work()
    return result, 1024 * (read_kibibytes("VmHWM") - before)


def read_kibibytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

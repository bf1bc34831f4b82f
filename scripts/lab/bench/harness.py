"""What benchmarks share: results files, fresh processes, memory. `ratios` hold only those of sides that took turns."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from configs.runtime.errors import InputError
from configs.runtime.files import write_json
from configs.runtime.redaction import mask_arguments, mask_secrets
from eval.stats.bootstrap import Interval
from scripts.lab.bench.provenance import check_place, describe_origin

log = logging.getLogger("draftsmith")


R = TypeVar("R")


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
    **extra: Any,
) -> None:
    value = {
        "name": name,
        "command": shlex.join(["python", "scripts/lab/benchmark.py", *mask_arguments(sys.argv[1:])]),
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


# --- processes and memory -------------------------------------------------------------------------------------------


def in_fresh_process(work: Callable[..., R], *arguments: Any) -> R:
    """Return what `work` does in a new process, which inherits neither memory nor a peak from this one."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def measure_growth(work: Callable[[], R]) -> tuple[R, int]:
    """Run `work`; return its result, and the bytes by which this process's resident memory grew at its peak."""
    before = 1024 * read_kibibytes("/proc/self/status", "VmRSS")
    # Resets the peak. getrusage's ru_maxrss cannot be reset, and begins with the peak of the parent process.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    result = work()
    return result, 1024 * read_kibibytes("/proc/self/status", "VmHWM") - before


def read_kibibytes(path: str, name: str) -> int:
    """Return the number of a line `NAME:  123 kB` of one of the kernel's files."""
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise InputError(f"this benchmark reads memory from {path}, which only Linux has: {error.strerror}") from error
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

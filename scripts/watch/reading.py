"""A run's folder as one object, while the run goes on and after it: from its files alone, any of which may be missing.

Files are read as they are found: half written, of an older run, of a training or an evaluation outside a run. What does not
parse is not there. Imports no torch.
"""

from __future__ import annotations

import difflib
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from configs.runtime.command import INTERRUPTED, TERMINATED
from configs.runtime.errors import InputError
from configs.runtime.files import LOCK_FILE, json_object, read_object, read_text
from configs.runtime.loading import parse_yaml
from configs.runtime.run_record import HELD_OUT, METRICS_FILE, SAMPLES_FILE
from configs.schema.commands.running import DRAFT_FILE
from configs.schema.target import TargetConfig
from eval.report.schema import load_report
from scripts.check.comparison import EngineCheck
from scripts.run.draft_file import read_choices
from scripts.run.steps import RECORD
from scripts.watch.state import PAGE, SILENT_SECONDS, Gate, Point, Progress, Read, Run, Samples, Stage, StageState

MARKS = (RECORD, DRAFT_FILE, METRICS_FILE, f"train/{METRICS_FILE}", "report.json", "eval/report.json")  # of a run's folder


class _Step(Read):
    done: bool = False
    began: float | None = None
    seconds: float | None = None
    code: int | None = None


class _Steps(Read):
    stages: list[str]
    planned_minutes: dict[str, float] = Field(default_factory=dict)
    steps: dict[str, _Step] = Field(default_factory=dict)


M = TypeVar("M", bound=BaseModel)


def find_run(named: str) -> Path:
    """Return the folder of a run, which may also be named by its draft.yaml."""
    path = Path(named)
    folder = path.parent if path.is_file() else path
    if _is_run(folder):
        return folder
    place = folder.parent if folder.parent.is_dir() else Path("runs")
    others: list[Path] = []
    for parent in (folder, place):
        with suppress(OSError):
            others += sorted(parent.iterdir())
    near = difflib.get_close_matches(str(folder), [str(other) for other in others if _is_run(other)], n=3, cutoff=0.0)
    found = f"holds no run, neither {RECORD} nor {METRICS_FILE}" if folder.is_dir() else "is not there"
    such_as = f", such as {' or '.join(near)}" if near else ""
    raise InputError(f"{named} {found}; name the folder that a run writes to (--output){such_as}")


def _is_run(folder: Path) -> bool:
    return any(os.path.isfile(folder / mark) for mark in MARKS)  # which is False where it may not be asked


def read_run(folder: Path) -> Run:
    """Return what the files of a run say now."""
    now = time.time()
    training, evaluation = (_part(folder, "train", METRICS_FILE), _part(folder, "eval", "report.json"))
    progress = _read(Progress, folder / "progress.json")
    files = (PAGE, DRAFT_FILE, RECORD, METRICS_FILE, SAMPLES_FILE, "report.json")
    written = [part / file for part in {folder, training, evaluation} for file in files]
    last = max([0.0 if progress is None else progress.time, *map(_modified, written)])
    is_locked, silent = _is_locked(folder), max(0.0, now - last)
    end = now if is_locked or silent < SILENT_SECONDS else last  # of what is under way
    stages = tuple(_stages(folder, training, evaluation, end))
    running = next((each.name for each in stages if each.state == "running"), None)
    losses, taus = _curves(training / METRICS_FILE)
    report = None
    with suppress(InputError):
        report = load_report(evaluation / "report.json")
    return Run(
        folder=folder,
        target=_target(folder, training),
        stages=stages,
        progress=progress if progress is not None and progress.stage == running else None,
        losses=tuple(losses),
        taus=tuple(taus),
        samples=_read(Samples, training / SAMPLES_FILE),
        report=report,
        gate=_read(Gate, evaluation / "gate.json"),
        check=_check(folder / "check" / "check.json"),
        choices=tuple(read_choices(folder / DRAFT_FILE)),
        links=_links(folder, evaluation),
        is_locked=is_locked,
        silent_seconds=silent,
        time=now,
    )


def _part(folder: Path, name: str, file: str) -> Path:
    """Return the folder of a stage; a folder that holds the stage's file itself is that of the stage alone."""
    return folder if (folder / file).is_file() else folder / name


def _values(path: Path) -> dict[str, Any] | None:
    with suppress(InputError):
        return read_object(path, path.name)
    return None


def _read(schema: type[M], path: Path) -> M | None:
    with suppress(InputError, ValidationError):
        return schema.model_validate(read_object(path, path.name))
    return None


def _check(path: Path) -> EngineCheck | None:
    with suppress(ValidationError):
        return TypeAdapter(EngineCheck).validate_python(_values(path))
    return None


def _modified(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _stages(folder: Path, training: Path, evaluation: Path, end: float) -> Iterator[Stage]:
    values = _values(folder / RECORD)
    if values is None:  # a training or an evaluation by itself, or a run that is about to begin
        if (training / METRICS_FILE).is_file():
            yield Stage(name="train", state="done" if (training / "outcome.json").is_file() else "running")
        if (evaluation / "report.json").is_file():
            yield Stage(name="eval", state="done")
        return
    if "stages" not in values:  # of an older version: the steps alone
        values = {"stages": list(values), "steps": values}
    try:
        record = _Steps.model_validate(values)
    except ValidationError:
        return
    latest = 0.0
    newest = max(reversed(record.steps), key=lambda name: record.steps[name].began or 0.0, default=None)
    for name in record.stages:
        step, planned = record.steps.get(name), record.planned_minutes.get(name)
        began = latest if step is None or step.began is None else step.began
        is_outdated, latest = began < latest, max(began, latest)  # by a stage before it, which ran again since
        # A stage that an earlier attempt broke off at will run again too.
        if step is None or is_outdated or not (step.done or name == newest):
            yield Stage(name=name, state="waiting", planned_minutes=planned)
            continue
        seconds = max(0.0, end - step.began) if step.seconds is None and step.began is not None else step.seconds
        used = None if seconds is None else seconds / 60
        yield Stage(name=name, state=_state(step), code=step.code, planned_minutes=planned, used_minutes=used)


def _state(step: _Step) -> StageState:
    if step.done:
        return "done"
    if step.seconds is None:
        return "running"
    return "stopped" if step.code in (None, INTERRUPTED, TERMINATED) else "failed"


def _curves(path: Path) -> tuple[list[Point], list[Point]]:
    """Return the loss and the tokens per target step on held-out prompts by step; lines that are cut off are left out."""
    losses: list[Point] = []
    taus: list[Point] = []
    for row in _rows(path):
        for curve, name in ((losses, "loss"), (taus, f"{HELD_OUT}tokens_per_target_step")):
            if _is_number(row.get("step")) and _is_number(row.get(name)):
                curve.append(Point(int(row["step"]), float(row[name])))
    return losses, taus


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that can be read."""
    with suppress(InputError):
        for line in read_text(path, path.name).split("\n"):
            with suppress(InputError):
                yield json_object(line, path.name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _target(folder: Path, training: Path) -> str | None:
    """Return the target's name: that of the request, else that of the training's or the folder's own record."""
    found: list[Any] = []
    with suppress(InputError):
        found.append(parse_yaml(read_text(folder / DRAFT_FILE, DRAFT_FILE), DRAFT_FILE) or {})
    found += [(_values(path / "run.json") or {}).get("config") for path in (training, folder)]
    for config in found:
        target = config.get("target", {}) if isinstance(config, dict) else None
        if isinstance(target, dict) and isinstance(name := target.get("name", TargetConfig().name), str):
            return name
    return None


def _links(folder: Path, evaluation: Path) -> dict[str, str]:
    named = {
        "report": evaluation / "report.html",
        "verdict": evaluation / "gate.md",
        **{f"how {path.parent.name} serves it": path for path in sorted(folder.glob("export/*/serve.txt"))},
        "check in the engine": folder / "check" / "check.json",
        "settings": folder / DRAFT_FILE,
    }
    return {what: path.relative_to(folder).as_posix() for what, path in named.items() if path.is_file()}


def _is_locked(folder: Path) -> bool:
    """Return whether a process of this machine holds a lock of the run or of a stage; the kernel is asked, no lock is taken."""
    beside = folder.absolute().with_name(f".{folder.absolute().name}{LOCK_FILE}")
    ours = set(_numbers([beside, folder / LOCK_FILE, *folder.glob(f"*/{LOCK_FILE}")]))
    try:
        held = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:  # not on Linux
        return False
    return any(not ours.isdisjoint(line.split()) for line in held.splitlines())


def _numbers(paths: Iterable[Path]) -> Iterator[str]:
    """Yield device and inode of files as `/proc/locks` names them."""
    for path in paths:
        with suppress(OSError):
            known = path.stat()
            yield f"{os.major(known.st_dev):02x}:{os.minor(known.st_dev):02x}:{known.st_ino}"

"""A run's folder as one object, while the run goes on and after it: from its files alone, any of which may be missing.

Their writers replace files whole, but for the metrics, whose last line may be cut off. Whether a run has died is told by when
it last wrote. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from configs.runtime.command import DONE, FAILED, INTERRUPTED, TERMINATED
from configs.runtime.errors import InputError
from configs.runtime.files import json_object, read_object, read_text
from configs.runtime.run_record import HELD_OUT, METRICS_FILE
from configs.runtime.run_record import RECORD as RUN_RECORD
from configs.schema.commands.running import DRAFT_FILE
from eval.report.schema import Report, load_report
from scripts.check.comparison import EngineCheck
from scripts.run.steps import RECORD, SEVERITY

SILENT_SECONDS = 120.0  # without a sign of life, after which that is said
DEAD_SECONDS = 1800.0  # after which nobody waits for one
WHOLE_STAGES = ("answers", "target cache", "training")  # work that ends when its stage does
TAU = f"{HELD_OUT}tokens_per_target_step"
StageState = Literal["waiting", "running", "done", "failed", "stopped"]


class Progress(NamedTuple):
    """`progress.json`, by `configs.runtime.terminal.progress`."""

    stage: str
    description: str
    done: int
    total: int
    unit: str
    rate: float
    seconds_left: float | None
    share: float
    time: float


class Point(NamedTuple):
    step: int
    value: float


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a run."""

    name: str
    state: StageState
    code: int | None = None
    planned_minutes: float | None = None
    used_minutes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run at one moment."""

    folder: Path
    target: str | None
    stages: tuple[Stage, ...]
    progress: Progress | None  # of the stage under way
    losses: tuple[Point, ...]
    taus: tuple[Point, ...]  # tokens per target step on held-out prompts
    report: Report | None
    gate: dict[str, Any]  # `gate.json`; empty before the verdict
    check: EngineCheck | None
    silent_seconds: float  # since it last wrote something

    @property
    def current(self) -> Stage | None:
        """The stage under way, else the one at which the run ended before its time."""
        found = {each.state: each for each in reversed(self.stages)}
        return found.get("running") or found.get("failed") or found.get("stopped")

    @property
    def state(self) -> Literal["running", "silent", "ended", "failed", "stopped"]:
        """Where the run is: "silent" where its stage was begun, and nothing was written for long."""
        stage = self.current
        if stage is not None and stage.state != "running":
            return "failed" if stage.state == "failed" else "stopped"
        if self.stages and all(each.state == "done" for each in self.stages):
            return "ended"
        if self.silent_seconds < SILENT_SECONDS:
            return "running"
        return "stopped" if stage is None else "silent"

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be expected."""
        return self.state in ("ended", "failed", "stopped") or (self.state == "silent" and self.silent_seconds > DEAD_SECONDS)

    @property
    def exit_code(self) -> int:
        """The code of the run itself where it is over: that of the stage that failed, else the worst verdict."""
        match self.state:
            case "failed":
                return (self.current and self.current.code) or FAILED
            case "stopped":
                return TERMINATED
            case "ended":
                return max((each.code or DONE for each in self.stages), key=SEVERITY.index)
        return FAILED if self.is_over else DONE

    @property
    def seconds_left(self) -> float | None:
        """Of the whole run: the plan's minutes of the stages to come, and what the stage under way says of itself."""
        if self.is_over or not any(each.planned_minutes is not None for each in self.stages):
            return None
        to_come = 60 * sum(each.planned_minutes or 0.0 for each in self.stages if each.state == "waiting")
        stage, own = self.current, None if self.progress is None else self.progress.seconds_left
        by_plan = 0.0 if stage is None else 60 * max(0.0, (stage.planned_minutes or 0.0) - (stage.used_minutes or 0.0))
        if self.progress is None or own is None:
            return to_come + by_plan
        return to_come + (own if self.progress.description in WHOLE_STAGES else max(own, by_plan))


def find_run(named: str) -> Path:
    """Return the folder of a run, which may also be named by its draft.yaml."""
    path = Path(named)
    folder = path.parent if path.is_file() else path
    if any(os.path.isfile(folder / mark) for mark in (RECORD, DRAFT_FILE, METRICS_FILE)):  # False where it may not be asked
        return folder
    found = f"holds no run, neither {RECORD} nor {METRICS_FILE}" if folder.is_dir() else "is not there"
    raise InputError(f"{named} {found}; name the folder that a run writes to (--output)")


def read_run(folder: Path) -> Run:
    """Return what the files of a run say now."""
    training = folder if (folder / METRICS_FILE).is_file() else folder / "train"  # a training's own output
    progress = Progress(**values) if (values := _values(folder / "progress.json")) else None
    metrics = list(_lines(training / METRICS_FILE))
    written = (folder / DRAFT_FILE, folder / RECORD, training / METRICS_FILE, folder / "eval" / "report.json")
    last = max([0.0 if progress is None else progress.time, *map(_modified, written)])
    silent = max(0.0, time.time() - last)
    end = time.time() if silent < SILENT_SECONDS else last
    record = _values(folder / RECORD)
    stages = tuple(_stages(record, end)) if record else tuple(_of_training(training))
    running = next((each.name for each in stages if each.state == "running"), None)
    checked, report = _values(folder / "check" / "check.json"), None
    with suppress(InputError):
        report = load_report(folder / "eval" / "report.json")
    return Run(
        folder=folder,
        target=_values(folder / RUN_RECORD).get("config", {}).get("target", {}).get("name"),
        stages=stages,
        progress=progress if progress is not None and progress.stage == running else None,
        losses=tuple(Point(row["step"], row["loss"]) for row in metrics if "loss" in row),
        taus=tuple(Point(row["step"], row[TAU]) for row in metrics if TAU in row),
        report=report,
        gate=_values(folder / "eval" / "gate.json"),
        check=TypeAdapter(EngineCheck).validate_python(checked) if checked else None,
        silent_seconds=silent,
    )


def _values(path: Path) -> dict[str, Any]:
    with suppress(InputError):
        return read_object(path, path.name)
    return {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(InputError):  # there is none, or the last line is cut off
        for line in read_text(path, path.name).splitlines():
            yield json_object(line, path.name)


def _modified(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _of_training(training: Path) -> Iterator[Stage]:
    """Yield the one stage of a training that was begun by itself."""
    if (training / METRICS_FILE).is_file():
        yield Stage(name="train", state="done" if (training / "outcome.json").is_file() else "running")


def _stages(record: dict[str, Any], end: float) -> Iterator[Stage]:
    """Yield the stages of `steps.json`; `end` is how far the one under way has come, in unix seconds."""
    steps, latest = record["steps"], 0.0
    newest = max(reversed(steps), key=lambda name: steps[name]["began"], default=None)
    for name in record["stages"]:
        step, planned = steps.get(name), record["planned_minutes"].get(name)
        # What was done before an earlier stage ran again will run again too, and so will what an earlier attempt broke off at.
        if step is None or step["began"] < latest or not (step["done"] or name == newest):
            yield Stage(name=name, state="waiting", planned_minutes=planned)
            continue
        latest, code = step["began"], step.get("code")
        used = step.get("seconds", max(0.0, end - latest)) / 60
        yield Stage(name=name, state=_state(step), code=code, planned_minutes=planned, used_minutes=used)


def _state(step: dict[str, Any]) -> StageState:
    if step["done"]:
        return "done"
    if "seconds" not in step:
        return "running"
    return "stopped" if step.get("code") in (None, INTERRUPTED, TERMINATED) else "failed"

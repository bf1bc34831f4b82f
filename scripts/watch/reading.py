"""A run's folder as one object, while the run goes on and after it: from its files alone, any of which may be missing.

Files are read as they are found: half written, of a training or an evaluation outside a run. What does not parse is not there.
Whether a run has died is told by when it last wrote. Imports no torch.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from configs.runtime.command import DONE, FAILED, INTERRUPTED, TERMINATED
from configs.runtime.errors import InputError
from configs.runtime.files import json_object, read_object, read_text
from configs.runtime.loading import parse_yaml
from configs.runtime.run_record import HELD_OUT, METRICS_FILE, SAMPLES_FILE
from configs.schema.commands.running import DRAFT_FILE
from configs.schema.target import TargetConfig
from eval.release import Finding, GateOutcome
from eval.report.schema import AnswerSample, Report, load_report
from scripts.check.comparison import EngineCheck
from scripts.run.steps import RECORD, SEVERITY

SILENT_SECONDS = 120.0  # without a sign of life, after which that is said
DEAD_SECONDS = 1800.0  # after which nobody waits for one
WHOLE_STAGES = ("answers", "target cache", "training")  # work that ends when its stage does
MARKS = (RECORD, DRAFT_FILE, METRICS_FILE, f"train/{METRICS_FILE}", "report.json", "eval/report.json")  # of a run's folder
StageState = Literal["waiting", "running", "done", "failed", "stopped"]
RunState = Literal["running", "silent", "ended", "failed", "stopped"]
M = TypeVar("M")


class Read(BaseModel):
    """Values of a file; others that stand there are passed over."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class Progress(Read):
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


class Samples(Read):
    """`samples.json` of a training."""

    step: int
    samples: list[AnswerSample]


class Gate(Read):
    """`gate.json`."""

    outcome: GateOutcome
    findings: list[Finding] = []


class Step(Read):
    """A stage that was begun, in `steps.json`."""

    done: bool = False
    began: float | None = None
    seconds: float | None = None
    code: int | None = None

    @property
    def state(self) -> StageState:
        if self.done:
            return "done"
        if self.seconds is None:
            return "running"
        return "stopped" if self.code in (None, INTERRUPTED, TERMINATED) else "failed"


class Steps(Read):
    """`steps.json`."""

    stages: list[str]
    planned_minutes: dict[str, float] = {}
    steps: dict[str, Step] = {}


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
    samples: Samples | None
    report: Report | None
    gate: Gate | None
    check: EngineCheck | None
    links: Mapping[str, str]  # to files, by what they are; paths below the folder
    silent_seconds: float  # since it last wrote something

    @property
    def running(self) -> Stage | None:
        """The stage under way."""
        return next((each for each in self.stages if each.state == "running"), None)

    @property
    def broken(self) -> Stage | None:
        """The stage at which the run ended before its time."""
        return next((each for each in self.stages if each.state in ("failed", "stopped")), None)

    @property
    def state(self) -> RunState:
        if self.broken is not None and self.running is None:
            return "failed" if self.broken.state == "failed" else "stopped"
        if self.stages and all(each.state == "done" for each in self.stages):
            return "ended"
        if self.silent_seconds < SILENT_SECONDS:
            return "running"
        return "stopped" if self.running is None else "silent"

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be expected."""
        return self.state in ("ended", "failed", "stopped") or (self.state == "silent" and self.silent_seconds > DEAD_SECONDS)

    @property
    def exit_code(self) -> int:
        """The code of the run itself where it is over: that of the stage that failed, else the worst verdict."""
        if self.state == "failed" and self.broken is not None:
            return self.broken.code or FAILED
        if self.state == "stopped":
            return TERMINATED
        if self.state == "ended":
            return max((each.code or DONE for each in self.stages), key=SEVERITY.index)
        return FAILED if self.is_over else DONE

    @property
    def best(self) -> Point | None:
        """The first of the best evaluations on held-out prompts, which is the draft that is kept."""
        return max(self.taus, key=lambda point: point.value, default=None)

    @property
    def seconds_left(self) -> float | None:
        """Of the whole run: the plan's minutes of the stages to come, and what the stage under way says of itself."""
        if self.is_over or not any(each.planned_minutes is not None for each in self.stages):
            return None
        to_come = 60 * sum(each.planned_minutes or 0.0 for each in self.stages if each.state == "waiting")
        return to_come + (0.0 if self.running is None else self._stage_left(self.running))

    def _stage_left(self, stage: Stage) -> float:
        by_plan = 60 * max(0.0, (stage.planned_minutes or 0.0) - (stage.used_minutes or 0.0))
        if self.progress is None or (own := self.progress.seconds_left) is None:
            return by_plan
        return own if self.progress.description in WHOLE_STAGES else max(own, by_plan)


def find_run(named: str) -> Path:
    """Return the folder of a run, which may also be named by its draft.yaml."""
    path = Path(named)
    folder = path.parent if path.is_file() else path
    if any(os.path.isfile(folder / mark) for mark in MARKS):  # which is False where it may not be asked
        return folder
    found = f"holds no run, neither {RECORD} nor {METRICS_FILE}" if folder.is_dir() else "is not there"
    raise InputError(f"{named} {found}; name the folder that a run writes to (--output)")


def read_run(folder: Path) -> Run:
    """Return what the files of a run say now."""
    now = time.time()
    training, evaluation = _part(folder, "train", METRICS_FILE), _part(folder, "eval", "report.json")
    progress = _read(Progress, folder / "progress.json")
    files = (DRAFT_FILE, RECORD, METRICS_FILE, SAMPLES_FILE, "report.json")
    written = [part / file for part in {folder, training, evaluation} for file in files]
    last = max([0.0 if progress is None else progress.time, *map(_modified, written)])
    silent = max(0.0, now - last)
    stages = tuple(_stages(folder, training, evaluation, now if silent < SILENT_SECONDS else last))
    running = next((each.name for each in stages if each.state == "running"), None)
    report = None
    with suppress(InputError):
        report = load_report(evaluation / "report.json")
    return Run(
        folder=folder,
        target=_target(folder, training),
        stages=stages,
        progress=progress if progress is not None and progress.stage == running else None,
        losses=tuple(_points(training / METRICS_FILE, "loss")),
        taus=tuple(_points(training / METRICS_FILE, f"{HELD_OUT}tokens_per_target_step")),
        samples=_read(Samples, training / SAMPLES_FILE),
        report=report,
        gate=_read(Gate, evaluation / "gate.json"),
        check=_read(EngineCheck, folder / "check" / "check.json"),
        links=_links(folder, evaluation),
        silent_seconds=silent,
    )


def _part(folder: Path, name: str, file: str) -> Path:
    """Return the folder of a stage; a folder that holds the stage's file itself is that of the stage alone."""
    return folder if (folder / file).is_file() else folder / name


def _values(path: Path) -> dict[str, Any] | None:
    with suppress(InputError):
        return read_object(path, path.name)
    return None


def _read(schema: type[M], path: Path) -> M | None:
    with suppress(ValidationError):
        return TypeAdapter(schema).validate_python(_values(path))
    return None


def _modified(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _stages(folder: Path, training: Path, evaluation: Path, end: float) -> Iterator[Stage]:
    """Yield the stages; `end` is how far what is under way has come, in unix seconds."""
    record = _read(Steps, folder / RECORD)
    if record is None:  # a training or an evaluation by itself, or a run that is about to begin
        if (training / METRICS_FILE).is_file():
            yield Stage(name="train", state="done" if (training / "outcome.json").is_file() else "running")
        if (evaluation / "report.json").is_file():
            yield Stage(name="eval", state="done")
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
        yield Stage(name=name, state=step.state, code=step.code, planned_minutes=planned, used_minutes=used)


def _points(path: Path, name: str) -> Iterator[Point]:
    """Yield a metric by step; lines that are cut off are left out."""
    with suppress(InputError):
        for line in read_text(path, path.name).split("\n"):
            with suppress(InputError):
                row = json_object(line, path.name)
                if _is_number(row.get("step")) and _is_number(row.get(name)):
                    yield Point(int(row["step"]), float(row[name]))


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

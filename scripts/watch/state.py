"""What is known of a run at one moment: its stages, its curves, what it has found, and what follows from these.

`scripts.watch.reading` makes it of a run's files. Whether a run under way has died is told by the locks of this machine, and
else by when it last wrote. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from configs.runtime.command import DONE, FAILED, TERMINATED
from eval.release.verdict import Finding, GateOutcome
from eval.report.schema import AnswerSample, Report
from scripts.check.comparison import EngineCheck
from scripts.run.draft_file import Choice
from scripts.run.steps import SEVERITY

PAGE = "index.html"  # in a run's folder
SILENT_SECONDS = 120.0  # without a sign of life, after which that is said
DEAD_SECONDS = 1800.0  # after which nobody waits for one
WHOLE_STAGES = ("answers", "target cache", "training")  # work that ends when its stage does
StageState = Literal["waiting", "running", "done", "failed", "stopped"]
RunState = Literal["running", "silent", "ended", "failed", "stopped"]


class Read(BaseModel):
    """Values of a file; what an older or a newer version adds is passed over."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class Progress(Read):
    """`progress.json`, by `configs.runtime.terminal.progress`."""

    stage: str
    description: str
    done: int
    total: int
    unit: str
    rate: float
    rate_unit: str
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
    choices: tuple[Choice, ...]
    links: Mapping[str, str]  # to files, by what they are; paths below the folder
    is_locked: bool  # by a process of this machine
    silent_seconds: float  # since it last wrote something
    time: float  # unix seconds

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
        if self.is_locked or self.silent_seconds < SILENT_SECONDS:
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
        if self.state == "silent":
            return FAILED if self.is_over else DONE
        codes = [each.code for each in self.stages if each.code in SEVERITY]
        return max(codes, key=SEVERITY.index, default=DONE) if self.state == "ended" else DONE

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

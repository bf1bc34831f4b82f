"""What a run measures and reports: metrics and seconds of its steps, OUTPUT/metrics.jsonl, experiment trackers.

Sums and counts are added over processes before any division. Beside the task's metrics stands the cost of the steps: tokens a
second, the share of time by part, FLOPs a second, peak memory (docs/running.md). A line of the file is written with each log
line and each evaluation: `step`, `seconds` since the run began (those of earlier processes included), then the metrics, those
of an evaluation under `held_out/`. Lines of steps are not synced to disk, those of evaluations are. Trackers (tensorboard,
wandb, trackio, mlflow) find their server and key in the environment (`WANDB_API_KEY`, `MLFLOW_TRACKING_URI`, `HF_TOKEN`).
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from torch import Tensor

from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import read_jsonl, read_text, write_text
from configs.runtime.redaction import mask_secrets
from configs.runtime.run_record import HELD_OUT, METRICS_FILE
from configs.schema.base import dotted
from configs.schema.training import ScheduleConfig
from heads.device import allocated_peak, has_timed_events, timed_event, upload
from heads.modules.interface import NO_DOCUMENT, Batch

OTHER = "other"
STEP_PARTS = ("data", "target", "loss", "backward", "optimizer", OTHER)
ASIDE = ("evaluation", "checkpoint")
MOST_MARKS = 10_000  # borders kept before they are turned into seconds
Moment = float | torch.Event
SHARE = "time_share_"
MIN_SHARE = 0.8  # of the predicted tokens beyond one a target step that decoding should yield
TRACKERS_FOLDER = "trackers"  # below the run's folder


class StepMetrics:
    """Sums and counts of this process since the last report."""

    def __init__(self, accelerator: Accelerator, clock: StepClock, flops_per_token: float) -> None:
        self.accelerator, self.clock, self.flops_per_token = accelerator, clock, flops_per_token
        self._clear()

    def add(self, sums: Mapping[str, Tensor], counts: Mapping[str, Tensor] | None = None) -> None:
        """Add sums by metric, over labels or over what `counts` says; between two reports all processes give the same names."""
        for name, value in sums.items():
            self.sums[name] += value.detach()
        for name, value in (counts or {}).items():
            self.counts[name] += value.detach()

    def close_step(self, window: Sequence[Batch], labels: int, norm: Tensor | float | None) -> None:
        """Add a step's micro-batches and labels in this process, and the norm of its gradient."""
        self.labels += labels
        self.tokens += sum(int((batch.on_host.document_ids_BT != NO_DOCUMENT).sum()) for batch in window)
        if norm is not None:
            self.norms.append(norm)

    def report(self) -> dict[str, float]:
        """Return averages since the last report and the cost of the steps, and start anew."""
        names = sorted(self.sums)
        own_labels = torch.full((), float(self.labels), device=self.accelerator.device)
        counts = [self.counts.get(name, own_labels) for name in names]
        table = torch.stack([own_labels, *(self.sums[name] for name in names), *counts])
        labels, *totals = self.accelerator.reduce(table, "sum").tolist()
        pairs = zip(totals[: len(names)], totals[len(names) :], strict=True)
        report = {name: value / max(count, 1) for name, (value, count) in zip(names, pairs, strict=True)}
        norms = [torch.as_tensor(norm, device=table.device) for norm in self.norms]
        report["gradient_norm"] = sum(torch.stack(norms).tolist()) / len(norms) if norms else 0.0
        report |= self._costs(labels)
        self._clear()
        return report

    def _costs(self, labels: float) -> dict[str, float]:
        """Return the cost of the steps since the last report over all processes: sums divided by sums, and peak memory."""
        now, device = self.clock.seconds(), self.accelerator.device
        own_seconds = [now[part] - self.seconds_before[part] for part in STEP_PARTS]
        own = [memory_peak(device), float(self.tokens), *own_seconds]
        rows = self.accelerator.gather(upload(torch.tensor([own]), device)).cpu()
        tokens, *seconds = rows[:, 1:].sum(0).tolist()
        whole = sum(seconds)
        elapsed = whole / len(rows)
        return {
            "labels_per_second": labels / elapsed,
            "tokens_per_second": tokens / elapsed,
            "model_tflops_per_second": self.flops_per_token * tokens / whole / 1e12,  # of one process
            "memory_peak_bytes": rows[:, 0].max().item(),
            **{f"{SHARE}{part}": of_part / whole for part, of_part in zip(STEP_PARTS, seconds, strict=True)},
        }

    def _clear(self) -> None:
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.accelerator.device))
        self.counts: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.accelerator.device))
        self.labels = self.tokens = 0
        self.norms: list[Tensor | float] = []
        self.seconds_before = self.clock.seconds()


def memory_peak(device: torch.device) -> float:
    """Return the most bytes that this process has held: of the device's memory, or the machine's where torch counts none."""
    peak = allocated_peak(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit if peak is None else peak)


class StepClock:
    """Seconds by part since `start`, at next to no cost and without waiting for the device.

    Time is charged to the innermost part that is under way, to `other` where there is none, so that the parts add up to the
    whole. On a CPU it is the wall clock's. On devices with timed events one is queued at each border and read when the seconds
    are asked for: it is the time of the device's own queue. The gradient of the draft's head is part of `loss`, as
    `distill.loss.fused` computes it there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._by_events = device, has_timed_events(device)
        self._part: str | None = None  # under way; None: not started
        self._since: Moment = 0.0
        self._marks: list[tuple[Moment, str]] = []  # the end of a part and its name, one after another
        self._seconds = dict.fromkeys((*STEP_PARTS, *ASIDE), 0.0)

    def start(self) -> None:
        self._since, self._part = self._now(), OTHER

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time the block as `part`, minus nested parts. Evaluation and checkpointing are not split further."""
        outer = self._part
        if outer is None or (outer in ASIDE and part not in ASIDE):
            yield
            return
        self._turn_to(part)
        try:
            yield
        finally:
            self._turn_to(outer)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part since the start."""
        if self._part is not None:
            self._turn_to(self._part)
            self._count()
        return dict(self._seconds)

    def _turn_to(self, part: str) -> None:
        assert self._part is not None
        self._marks.append((self._now(), self._part))
        self._part = part
        if len(self._marks) >= MOST_MARKS:
            self._count()

    def _count(self) -> None:
        if self._marks and not isinstance(last := self._marks[-1][0], float):
            last.synchronize()  # the queue is in order: all before it have come, too
        for moment, part in self._marks:
            self._seconds[part] += _between(self._since, moment)
            self._since = moment
        self._marks.clear()

    def _now(self) -> Moment:
        return timed_event(self._device) if self._by_events else time.perf_counter()


def _between(start: Moment, end: Moment) -> float:
    """Return seconds from one moment to a later one of the same kind, both of which have come."""
    if isinstance(start, float):
        return cast(float, end) - start
    return start.elapsed_time(cast(torch.Event, end)) / 1000


# --- reports ------------------------------------------------------------------------------------------------------


class MetricsFile:
    """The metrics file of a run; of earlier lines steps up to `done_steps` and evaluations up to `evaluated_steps` are kept."""

    def __init__(self, output: Path, *, done_steps: int, evaluated_steps: int) -> None:
        self.path = output / METRICS_FILE
        last = {False: done_steps, True: evaluated_steps}
        kept = [row for row in self._earlier() if row["step"] <= last[_is_evaluation(row)]] if done_steps else []
        self.earlier_seconds = kept[-1]["seconds"] if kept else 0.0
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def add(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Append a line; `seconds` are since this process began to train."""
        row = {"step": step, "seconds": self.earlier_seconds + seconds, **metrics}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                if _is_evaluation(row):
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _earlier(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        whole, newline, _ = read_text(self.path, "training metrics").rpartition("\n")  # a killed process may leave half a line
        if not newline:
            return []
        write_text(self.path, whole + newline)
        return read_lines(self.path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, oldest first; an InputError names one that `MetricsFile` did not write."""
    rows = []
    for number, row in read_jsonl(path, "training metrics"):
        if not all(isinstance(row.get(name), int | float) for name in ("step", "seconds")):
            raise InputError(f"training metrics {path}, line {number}: step and seconds must be numbers; remove the file")
        rows.append(row)
    return rows


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    return any(name.startswith(HELD_OUT) for name in row)


def explain_gap(metrics: Mapping[str, float]) -> str | None:
    """Return a warning where decoding yields much less than agreement predicts, else None."""
    predicted, decoded = metrics.get("predicted_tau"), metrics["tokens_per_target_step"]
    if predicted is None or decoded >= 1 + MIN_SHARE * (predicted - 1):
        return None
    return (
        f"held-out prompts were decoded at {decoded:.3f} tokens per target step, while agreement on the held-out answers "
        f"predicts {predicted:.3f}: either the head does not draft from what it was trained on (a wrong hidden state, off by "
        "one, another concat order), or the answers in data.held_out are not the target's greedy ones"
    )


def check_trackers(schedule: ScheduleConfig) -> None:
    """Refuse a tracker whose library is missing, which accelerate would ignore."""
    available = {tracker.value for tracker in get_available_trackers()}
    for tracker in schedule.trackers:
        if tracker not in available:
            raise ConfigError(f"schedule.trackers: {tracker} is not installed; install it, or take it out of the list")


def start_trackers(accelerator: Accelerator, output: Path, config: Mapping[str, Any]) -> None:
    """Begin a run, named after the output folder, with every tracker that the accelerator has; `config` is as JSON values."""
    name = output.resolve().name
    folder = output / TRACKERS_FOLDER
    if accelerator.is_main_process and accelerator.log_with:
        folder.mkdir(parents=True, exist_ok=True)  # wandb would go elsewhere without it
    accelerator.init_trackers(
        "draftsmith",
        config=flat_config(config),
        init_kwargs={
            "wandb": {"name": name, "dir": str(folder)},
            "trackio": {"name": name},
            "mlflow": {"run_name": name},
        },
    )


def flat_config(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return a config's settings by dotted key (mlflow drops long values), lists and nulls as JSON, secrets masked."""
    flat = dotted(mask_secrets(dict(config)))
    return {key: value if isinstance(value, bool | int | float | str) else json.dumps(value) for key, value in flat}

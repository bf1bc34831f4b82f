"""What a run reports: OUTPUT/metrics.jsonl, also without a tracker, and accelerate's experiment trackers.

A line of the file is written with each log line and each evaluation: `step`, `seconds` since the run began (those of earlier
processes included), then the metrics, those of an evaluation under `held_out/`. Lines of steps are not synced to disk, those of
evaluations are. Trackers (tensorboard, wandb, trackio, mlflow) find their server and key in the environment (`WANDB_API_KEY`,
`MLFLOW_TRACKING_URI`, `HF_TOKEN`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import read_jsonl, read_text, write_text
from configs.runtime.redaction import mask_secrets
from configs.runtime.run_record import HELD_OUT, METRICS_FILE
from configs.schema.training import ScheduleConfig

MIN_SHARE = 0.8  # of the predicted tokens beyond one a target step that decoding should yield
TRACKERS_FOLDER = "trackers"  # below the run's folder


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
    flat = flatten(mask_secrets(dict(config))).items()
    return {key: value if isinstance(value, bool | int | float | str) else json.dumps(value) for key, value in flat}


def flatten(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested settings by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flatten(value, f"{above}{name}.") if isinstance(value, dict) else {above + name: value}
    return flat

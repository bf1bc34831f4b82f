"""OUTPUT/metrics.jsonl: the metrics of a run's steps and evaluations, also without a tracker.

A line is written with each log line and each evaluation: `step`, `seconds` since the run began (those of earlier processes
included), then the metrics, those of an evaluation under `held_out/`. Lines of steps are not synced to disk, those of
evaluations are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.files import read_jsonl, read_text, write_text

METRICS_FILE = "metrics.jsonl"
HELD_OUT = "held_out/"
DECODED, PREDICTED = "tokens_per_target_step", "predicted_tau"
MIN_SHARE = 0.8  # of the predicted tokens beyond one a target step that decoding should yield


class MetricsFile:
    """The metrics file of a run; lines up to the step resumed from are kept.

    Args:
        done_steps: of the checkpoint resumed from; later steps are taken again and their lines replaced. 0 for a run from the
            start.
        evaluated_steps: the last of them whose evaluation need not be repeated; None: `done_steps`.

    Raises:
        InputError: an earlier process's lines cannot be read, or the folder cannot be written.
    """

    def __init__(self, output: Path, *, done_steps: int, evaluated_steps: int | None = None) -> None:
        self.path = output / METRICS_FILE
        last = {False: done_steps, True: done_steps if evaluated_steps is None else evaluated_steps}
        kept = [row for row in self._earlier() if row["step"] <= last[_is_evaluation(row)]] if done_steps else []
        self.earlier_seconds = kept[-1]["seconds"] if kept else 0.0
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def add(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Append a line.

        Args:
            seconds: since this process began to train.

        Raises:
            InputError: the file cannot be written.
        """
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
        return _read(self.path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file that are of steps, oldest first.

    Raises:
        InputError: there is none, or a line is not what `MetricsFile` writes.
    """
    return [row for row in _read(path) if not _is_evaluation(row)]


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Return the lines that are of evaluations, oldest first, with the metrics' own names; see `read_metrics`."""
    return [{name.removeprefix(HELD_OUT): value for name, value in row.items()} for row in _read(path) if _is_evaluation(row)]


def explain_gap(metrics: Mapping[str, float]) -> str | None:
    """Return a warning where decoding yields much less than agreement predicts, else None."""
    predicted, decoded = metrics.get(PREDICTED), metrics[DECODED]
    if predicted is None or decoded >= 1 + MIN_SHARE * (predicted - 1):
        return None
    return (
        f"held-out prompts were decoded at {decoded:.3f} tokens per target step, while agreement on the held-out answers "
        f"predicts {predicted:.3f}: either the head does not draft from what it was trained on (a wrong hidden state, off by "
        "one, another concat order), or the answers in data.held_out are not the target's greedy ones"
    )


def _read(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, row in read_jsonl(path, "training metrics"):
        if not all(isinstance(row.get(name), int | float) for name in ("step", "seconds")):
            raise InputError(f"training metrics {path}, line {number}: step and seconds must be numbers; remove the file")
        rows.append(row)
    return rows


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    return any(name.startswith(HELD_OUT) for name in row)

"""OUTPUT/metrics.jsonl: the step metrics of a run, also without a tracker; and the reader of such files of steps.

A line is written with each log line: `step`, `seconds` since the run began (those of earlier processes included), then what
a tracker gets under `train/`. Lines are appended and not synced, so a machine that fails may lose some, while evaluations
(`train.telemetry.history`) are never lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.files import read_jsonl, read_text, write_text

METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """The metrics file of a run; lines up to the step resumed from are kept.

    Args:
        done_steps: of the checkpoint resumed from; later steps are taken anew and their lines replaced. 0 for a run from the
            start.

    Raises:
        InputError: an earlier process's lines cannot be read, or the folder cannot be written.
    """

    def __init__(self, output: Path, *, done_steps: int) -> None:
        self.path = output / METRICS_FILE
        kept = [row for row in self._earlier() if row["step"] <= done_steps] if done_steps else []
        self.earlier_seconds = kept[-1]["seconds"] if kept else 0.0
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def add(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Append a line.

        Args:
            seconds: since this process began to train.

        Raises:
            InputError: the file cannot be written.
        """
        line = json.dumps({"step": step, "seconds": self.earlier_seconds + seconds, **metrics})
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _earlier(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        whole, newline, _ = read_text(self.path, "training metrics").rpartition("\n")  # a killed process may leave half a line
        if not newline:
            return []
        write_text(self.path, whole + newline)
        return read_metrics(self.path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, oldest first.

    Raises:
        InputError: there is none, or a line is not what `MetricsFile` writes.
    """
    return read_steps(path, "training metrics")


def read_steps(path: Path, what: str) -> list[dict[str, Any]]:
    """Return the rows of a file of one JSON object a line, each with the numbers `step` and `seconds`.

    Args:
        what: its name in complaints.

    Raises:
        InputError: there is none, or a row lacks one of the numbers.
    """
    rows = []
    for number, row in read_jsonl(path, what):
        if not all(isinstance(row.get(name), int | float) for name in ("step", "seconds")):
            raise InputError(f"{what} {path}, line {number}: step and seconds must be numbers; remove the file")
        rows.append(row)
    return rows

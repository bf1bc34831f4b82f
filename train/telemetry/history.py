"""The evaluations of a training run: OUTPUT/history.jsonl, drawn in OUTPUT/history.svg.

A line holds `step`, `seconds` since the run began (those of earlier processes included) and the held-out metrics. The picture
shows the tokens per target step that were decoded beside those predicted from agreement (`train.tasks.held_out`): where they
differ, the head does not draft as it was trained.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from configs.runtime.files import write_text
from eval.report.plots import FAINT, FIRST, FOURTH, INK, LINE, SECOND, STYLE, THIRD, WIDTH
from train.telemetry.files import read_steps

LINES_FILE = "history.jsonl"
PICTURE_FILE = "history.svg"
DECODED, PREDICTED = "tokens_per_target_step", "predicted_tau"
LEAST_SHARE = 0.8  # of the predicted tokens beyond one a target step that decoding should yield
# The file stands alone, so it brings the colours that the report's page would define.
COLOURS = {
    INK: "#1d2126",
    FAINT: "#626a73",
    LINE: "#dfdcd4",
    FIRST: "#1f6f8b",
    SECOND: "#c46a2b",
    THIRD: "#6b8f3f",
    FOURTH: "#9a8fb0",
}

Row = Mapping[str, float]


class History:
    """The evaluations so far, written to disk after each one.

    Args:
        done_steps: of the checkpoint resumed from; later evaluations are made anew and their lines replaced. 0 for a run from
            the start.

    Raises:
        InputError: an earlier process's lines cannot be read.
    """

    def __init__(self, output: Path, *, done_steps: int) -> None:
        self.output = output
        self.rows = _earlier(output / LINES_FILE, done_steps)
        self.earlier_seconds = self.rows[-1]["seconds"] if self.rows else 0.0

    def add(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Append an evaluation and draw all of them.

        Args:
            seconds: since this process began to train.

        Raises:
            InputError: the output cannot be written.
        """
        self.rows.append({"step": step, "seconds": self.earlier_seconds + seconds, **metrics})
        write_text(self.output / LINES_FILE, "".join(json.dumps(row) + "\n" for row in self.rows))
        write_text(self.output / PICTURE_FILE, draw_history(self.rows))


def explain_gap(metrics: Mapping[str, float]) -> str | None:
    """Return a warning where decoding yields much less than agreement predicts, else None."""
    predicted, decoded = metrics.get(PREDICTED), metrics[DECODED]
    if predicted is None or decoded >= 1 + LEAST_SHARE * (predicted - 1):
        return None
    return (
        f"held-out prompts were decoded at {decoded:.3f} tokens per target step, while agreement on the held-out answers "
        f"predicts {predicted:.3f}: either the head does not draft from what it was trained on (a wrong hidden state, off by "
        "one, another concat order), or the answers in data.held_out are not the target's greedy ones"
    )


def draw_history(rows: Sequence[Row]) -> str:
    """Return an SVG file: tokens per target step decoded and predicted against the step, and acceptance by depth below."""
    depths = sorted({int(name.removeprefix("conditional_")) for row in rows for name in row if name.startswith("conditional_")})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.3 * WIDTH, 5.2 if depths else 2.9), layout="constrained")
        panels = figure.subplots(2 if depths else 1, 1, sharex=True, squeeze=False)[:, 0]
        _line(panels[0], rows, DECODED, label="decoded", color=FIRST, marker="o")
        _line(panels[0], rows, PREDICTED, label="predicted from agreement", color=SECOND, marker="s", linestyle="--")
        panels[0].set(ylabel="tokens per target step")
        for number in depths:
            strength = 1 - 0.7 * (number - 1) / max(depths)
            _line(panels[1], rows, f"conditional_{number}", label=f"draft {number}", color=THIRD, marker="o", alpha=strength)
        if depths:
            panels[1].set(ylabel="agrees, given all before", ylim=(0, 1.03))
            panels[1].yaxis.set_major_formatter(PercentFormatter(1.0))
        for axes in panels:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        panels[-1].set(xlabel="optimiser step")
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        return as_file(figure)


def _line(axes: Axes, rows: Sequence[Row], name: str, **style: Any) -> None:
    points = [(row["step"], row[name]) for row in rows if name in row]
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def as_file(figure: Figure) -> str:
    """Return the figure as a whole SVG file; equal histories give equal files."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    for stand_in, colour in COLOURS.items():
        svg = svg.replace(stand_in, colour)
    return svg


def _earlier(path: Path, done_steps: int) -> list[dict[str, Any]]:
    if not done_steps or not path.exists():
        return []
    return [row for row in read_steps(path, "training history") if row["step"] <= done_steps]

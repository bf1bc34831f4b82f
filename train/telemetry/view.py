"""The step metrics of a run as a table for the terminal and as `OUTPUT/metrics.svg` (`scripts/show_training.py`).

Neighbouring lines are merged by their mean, which is that of their steps, as all lines but the last cover equally many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eval.report.plots import FAINT, FIRST, FOURTH, SECOND, STYLE, THIRD, WIDTH
from train.telemetry.history import as_file
from train.telemetry.step_clock import STEP_PARTS
from train.telemetry.step_metrics import SHARE

MOST_ROWS, MOST_BARS = 15, 60
LEAST_SHARE = 0.005  # of a part that gets a column
COLOURS = {  # with opacity
    "data": (FOURTH, 1.0),
    "rewriting": (FOURTH, 0.5),
    "target": (FIRST, 1.0),
    "draft": (SECOND, 1.0),
    "loss": (SECOND, 0.65),
    "backward": (SECOND, 0.35),
    "communication": (THIRD, 1.0),
    "optimizer": (THIRD, 0.5),
    "other": (FAINT, 0.4),
}

MFU = "model_flop_utilization"
Row = Mapping[str, float]


def as_table(rows: Sequence[Row]) -> str:
    """Return a few lines of text: step, loss, speed, and the parts that took time at all."""
    rows = merged(rows, MOST_ROWS)
    columns = {
        "step": [f"{row['step']:.0f}" for row in rows],
        "seconds": [f"{row['seconds']:.0f}" for row in rows],
        "loss": [f"{row['loss']:.4g}" for row in rows],
        "tokens/s": [f"{row['tokens_per_second']:.0f}" for row in rows],
        **({"MFU": [f"{row[MFU]:.1%}" for row in rows]} if all(MFU in row for row in rows) else {}),
        "memory GB": [f"{row['memory_peak_bytes'] / 1e9:.2f}" for row in rows],
        **{f"% {part}": [f"{100 * row[SHARE + part]:.1f}" for row in rows] for part in _worth_showing(rows)},
    }
    widths = [max(len(name), *map(len, texts)) for name, texts in columns.items()]
    lines = [list(columns), *zip(*columns.values(), strict=True)]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def draw_metrics(rows: Sequence[Row]) -> str:
    """Return an SVG file: the loss against the step, and below it which part of the time went where."""
    rows = merged(rows, MOST_BARS)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.3 * WIDTH, 4.6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        above.plot([row["step"] for row in rows], [row["loss"] for row in rows], color=FIRST)
        above.set(ylabel="loss")
        _draw_shares(below, rows)
        below.set(xlabel="optimiser step", ylabel="share of the time", ylim=(0, 1))
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        below.yaxis.set_major_formatter(PercentFormatter(1.0))
        below.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
        return as_file(figure)


def merged(rows: Sequence[Row], most: int) -> list[dict[str, float]]:
    """Return at most so many rows: the means of neighbours, with the last one's step and seconds; metrics that all have."""
    size = -(-len(rows) // most)
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [_mean(group) for group in groups]


def _mean(group: Sequence[Row]) -> dict[str, float]:
    shared = [name for name in group[0] if all(name in row for row in group)]
    means = {name: sum(row[name] for row in group) / len(group) for name in shared}
    return means | {name: group[-1][name] for name in ("step", "seconds")}


def _worth_showing(rows: Sequence[Row]) -> list[str]:
    return [part for part in STEP_PARTS if max(row[SHARE + part] for row in rows) >= LEAST_SHARE]


def _draw_shares(axes: Axes, rows: Sequence[Row]) -> None:
    ends = [row["step"] for row in rows]
    starts = [0.0, *ends[:-1]]
    widths = [end - start for start, end in zip(starts, ends, strict=True)]
    bottoms = [0.0] * len(rows)
    for part in STEP_PARTS:
        shares = [row[SHARE + part] for row in rows]
        colour, strength = COLOURS[part]
        label = part if part in _worth_showing(rows) else None
        axes.bar(starts, shares, widths, bottoms, align="edge", color=colour, alpha=strength, label=label)
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]

"""A report's pictures, as SVG to stand inside a page; `eval.report.plots` is what they are drawn on.

What every picture is drawn on: sizes, stand-in colours, and the way into a page as SVG.

Colours are names, not values: every picture is drawn in stand-in colours, which are then replaced by the page's CSS
variables, so that the same file reads well in light and in dark. Text stays text, in the page's own font. Equal numbers give
equal bytes. No window system and no global state of matplotlib is touched: a picture is drawn within `rc_context(STYLE)`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

INK, FAINT, LINE = "#010101", "#020202", "#030303"
FIRST, SECOND, THIRD, FOURTH = "#040404", "#050505", "#060606", "#070707"
VARIABLES = {
    INK: "var(--ink)",
    FAINT: "var(--ink-soft)",
    LINE: "var(--line)",
    FIRST: "var(--series-1)",
    SECOND: "var(--series-2)",
    THIRD: "var(--series-3)",
    FOURTH: "var(--series-4)",
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "draftsmith",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}
WIDTH = 5.0  # inches; narrow enough for the text to be readable when a phone scales the picture down


def canvas(height: float, grid: str = "y") -> tuple[Figure, Axes]:
    """Return a figure of the common width and its axes, with grid lines along one axis.

    Args:
        height: inches.
        grid: `x` or `y`.
    """
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(False)
    axes.grid(True, axis=grid)  # type: ignore[arg-type]
    return figure, axes


def legend_above(figure: Figure) -> None:
    """Put the legend in a line over the picture."""
    figure.legend(loc="outside upper left", ncols=4, columnspacing=1.4, handlelength=1.3, borderaxespad=0)


def gaps(values: Sequence[float | None]) -> list[float]:
    """Return values with holes where nothing was measured, as matplotlib wants them."""
    return [math.nan if value is None else value for value in values]


def plain(name: str) -> str:
    """Return a name that matplotlib takes as it is: it would read `$` as the start of a formula."""
    return name.replace("$", r"\$")


def as_svg(figure: Figure, name: str) -> str:
    """Return the figure as an SVG element: no prologue, no metadata, ids of its own, colours by name."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'^<svg([^>]*?) width="[^"]*" height="[^"]*"', r'<svg\1 aria-hidden="true"', svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


LINES, COLOURS = ("-", "--", ":"), (FIRST, SECOND, THIRD, FOURTH)
PHASES = (
    ("draft", "draft", FIRST),
    ("verify", "target", SECOND),
    ("sample", "accept and draw", THIRD),
    ("overhead", "rest", FOURTH),
)


def draw_positions(report: Mapping[str, Any]) -> str:
    """Draw acceptance by draft position: given all before, survival, and the overlap of the two distributions."""
    acceptance = report["acceptance"]
    series = (
        ("given all before", acceptance["position_conditional"], FIRST, "-", "o"),
        ("survival", acceptance["position_survival"], SECOND, "-", "s"),
        ("overlap α", acceptance["overlap_alpha_by_position"], THIRD, "--", "D"),
    )
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(2.9)
        for label, values, colour, line, marker in series:
            positions = range(1, len(values) + 1)
            axes.plot(positions, gaps(values), line, color=colour, marker=marker, label=label)
        axes.set(ylim=(0, 1.03), xlabel="draft position")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        legend_above(figure)
        return as_svg(figure, "positions")


def draw_histogram(report: Mapping[str, Any]) -> str:
    """Draw the share of rounds by number of accepted tokens."""
    counts = report["acceptance"]["accepted_histogram"]
    total = max(1, sum(counts))
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(2.9)
        bars = axes.bar(range(len(counts)), [count / total for count in counts], color=FIRST, width=0.72)
        axes.bar_label(bars, [f"{100 * count / total:.0f} %" for count in counts], padding=2, color=INK)
        axes.set(xlabel="accepted tokens in a round", yticks=[])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines["left"].set_visible(False)
        axes.margins(y=0.12)
        return as_svg(figure, "histogram")


def draw_phases(report: Mapping[str, Any]) -> str | None:
    """Draw milliseconds per token by phase, plain against speculative; `None` where nothing was timed."""
    speed = report["speed"]
    if speed is None:
        return None
    rows = (("plain", "phases_autoregressive", "autoregressive"), ("speculative", "phases", "speculative"))
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(2.2, grid="x")
        for row, (_, phases, mode) in enumerate(rows):
            start = 0.0
            for name, label, colour in PHASES:
                width = 1000 * speed[phases][f"{name}_seconds"] / max(1, speed[f"decode_tokens_{mode}"])
                axes.barh(row, width, left=start, color=colour, height=0.56, label=label if row == 0 else None)
                start += width
            axes.annotate(f"{start:.1f}", (start, row), xytext=(4, 0), textcoords="offset points", va="center", color=INK)
        axes.set(xlabel="milliseconds per token", yticks=range(len(rows)), yticklabels=[label for label, _, _ in rows])
        axes.invert_yaxis()
        axes.margins(x=0.1)
        legend_above(figure)
        return as_svg(figure, "phases")


def draw_predicted(report: Mapping[str, Any]) -> str | None:
    """Draw the expected decode speedup by batch size, a line for each number of drafts, and the measured one with its interval.

    `None` where no cost model was fitted.
    """
    speed = report["speed"] or {}
    predicted = speed.get("predicted")
    if predicted is None:
        return None
    shown = [each for each in predicted["settings"] if each["context_tokens"] == predicted["context_tokens"]]
    gammas = sorted({each["num_speculative_tokens"] for each in shown})
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(2.9)
        axes.axhline(1.0, color=FAINT, linewidth=0.9, linestyle=(0, (2, 2)))
        for gamma, (line, colour) in zip(gammas, product(LINES, COLOURS), strict=False):
            points = sorted(
                (each["batch_size"], each["decode_speedup"]) for each in shown if each["num_speculative_tokens"] == gamma
            )
            axes.plot(*zip(*points, strict=True), line, color=colour, label=f"{gamma} draft{'s' * (gamma > 1)}")
        batch_size, bounds = report["decode"]["batch_size"], speed["decode_speedup_ci"]
        if bounds is not None:
            axes.plot([batch_size] * 2, bounds, color=INK, linewidth=1.4)
        if speed["decode_speedup"] is not None:
            axes.plot([batch_size], [speed["decode_speedup"]], "D", color=INK, label="measured")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(ylim=(0, None), xlabel="batch size")
        legend_above(figure)
        return as_svg(figure, "predicted")


def draw_categories(report: Mapping[str, Any]) -> str:
    """Draw tokens per target step and decode speedup by category, each with its interval; 1 is plain decoding."""
    return draw_rows(report["by_category"], "categories")


def draw_rows(sections: Mapping[str, Mapping[str, Any]], picture: str) -> str:
    """Draw tokens per target step and decode speedup of several things, a row each.

    Args:
        sections: by name, each with `acceptance` and `speed` (or `None`) as in a report.
        picture: its name, unique in a page.
    """
    panels = (("tokens per target step", "acceptance", "tokens_per_target_step"), ("decode speedup", "speed", "decode_speedup"))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2 * WIDTH, 0.9 + 0.27 * len(sections)), layout="constrained")
        for axes, (label, part, metric) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
            axes.grid(False)
            axes.axvline(1.0, color=FAINT, linewidth=0.9, linestyle=(0, (2, 2)))
            for row, section in enumerate(sections.values()):
                _draw_interval(axes, row, section[part] or {}, metric)
            axes.set(xlabel=label, yticks=range(len(sections)), yticklabels=[plain(name) for name in sections])
            axes.spines["left"].set_visible(False)
        axes.set_ylim(len(sections) - 0.4, -0.6)
        return as_svg(figure, picture)


def _draw_interval(axes: Axes, row: int, section: Mapping[str, Any], metric: str) -> None:
    """Draw a point with its interval on one row; what was not measured stays empty."""
    value, bounds = section.get(metric), section.get(f"{metric}_ci")
    if value is None:
        return
    if bounds is not None:
        axes.plot(bounds, [row, row], color=FIRST, linewidth=2.2, alpha=0.45, solid_capstyle="round")
    axes.plot([value], [row], "o", color=FIRST)


def draw_reliability(report: Mapping[str, Any]) -> str | None:
    """Draw what the draft's confidence is worth: the target's probability, and the share kept, by class of confidence.

    The area of a point is the share of drafts in its class. `None` where no draft was compared.
    """
    lines = (("target's probability", "target_probability", FIRST), ("share kept", "accepted", SECOND))
    classes = report["acceptance"].get("reliability") or ()
    return _draw_classes(classes, lines, "the draft's own probability for its token", "reliability")


def draw_stopping(report: Mapping[str, Any]) -> str | None:
    """Draw the share kept by the confidence that stopping rules read; `None` without a rule, or where nothing was compared."""
    if report["decode"].get("stopping") is None:
        return None
    classes = report["acceptance"].get("stopping_reliability") or ()
    return _draw_classes(classes, (("share kept", "accepted", SECOND),), "the distribution's largest probability", "stopping")


def _draw_classes(
    classes: Sequence[Mapping[str, Any]], lines: Sequence[tuple[str, str, str]], label: str, name: str
) -> str | None:
    classes = [each for each in classes if each["num_drafts"]]
    if not classes:
        return None
    confidences = [each["confidence"] for each in classes]
    most = max(each["num_drafts"] for each in classes)
    areas = [12 + 110 * each["num_drafts"] / most for each in classes]
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(2.9)
        axes.plot([0, 1], [0, 1], color=FAINT, linewidth=0.9, linestyle=(0, (2, 2)))
        for line, key, colour in lines:
            values = [each[key] for each in classes]
            axes.plot(confidences, values, color=colour, label=line)
            axes.scatter(confidences, values, s=areas, color=colour, alpha=0.55, linewidths=0)
        axes.set(xlim=(0, 1), ylim=(0, 1.03), xlabel=label)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1.0))
        legend_above(figure)
        return as_svg(figure, name)

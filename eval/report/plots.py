"""A report's plots, as SVG elements to stand inside a page.

Everything is drawn in placeholder colours, which `as_svg` replaces by the page's CSS variables, so that the same file reads
well in light and in dark. Text stays text, in the page's own font. Equal numbers give equal bytes. No window system and no
global state of matplotlib is touched: a plot is drawn within `rc_context(STYLE)`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from configs.runtime.terminal import one_line
from eval.report.schema import CategorySection, Report
from eval.report.sections import ClosedSection

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
WIDTH = 5.0  # inches; narrow enough for the text to be readable when a phone scales the plot down
REFERENCE: dict[str, Any] = {"color": FAINT, "linewidth": 0.9, "linestyle": (0, (2, 2))}  # the line of plain decoding


def draw_positions(report: Report) -> str:
    """Draw acceptance by draft position: given all before, survival, and the overlap of the two distributions."""
    acceptance = report.acceptance
    series = (
        ("given all before", acceptance.position_conditional, FIRST, "-o"),
        ("survival", acceptance.position_survival, SECOND, "-s"),
        ("overlap α", acceptance.overlap_alpha_by_position, THIRD, "--D"),
    )
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
        axes = figure.subplots()
        for label, values, colour, line in series:
            shown = [math.nan if value is None else value for value in values]  # a line is interrupted at NaN
            axes.plot(range(1, len(shown) + 1), shown, line, color=colour, label=label)
        axes.set(ylim=(0, 1.03), xlabel="draft position")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        figure.legend(loc="outside upper left", ncols=4, columnspacing=1.4, handlelength=1.3, borderaxespad=0)
        return as_svg(figure, "positions")


def draw_rows(sections: Mapping[str, CategorySection | Report], name: str) -> str:
    """Draw tokens per target step and decode speedup of categories or reports by label, a row each; 1 is plain decoding."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2 * WIDTH, 0.9 + 0.27 * len(sections)), layout="constrained")
        taus, speedups = figure.subplots(1, 2, sharey=True)
        for axes, label in ((taus, "tokens per target step"), (speedups, "decode speedup")):
            axes.grid(False)
            axes.axvline(1.0, **REFERENCE)
            labels = [one_line(each).replace("$", r"\$") for each in sections]  # matplotlib reads `$` as the start of a formula
            axes.set(xlabel=label, yticks=range(len(sections)), yticklabels=labels)
            axes.spines["left"].set_visible(False)
        for row, section in enumerate(sections.values()):
            _draw_interval(taus, row, section.acceptance, "tokens_per_target_step")
            _draw_interval(speedups, row, section.speed, "decode_speedup")
        taus.set_ylim(len(sections) - 0.4, -0.6)
        return as_svg(figure, name)


def _draw_interval(axes: Axes, row: int, section: ClosedSection | None, metric: str) -> None:
    """Draw a point with its interval on one row; what was not measured stays empty."""
    value, bounds = (None, None) if section is None else section.interval_of(metric)
    if value is None:
        return
    if bounds is not None:
        axes.plot(bounds, [row, row], color=FIRST, linewidth=2.2, alpha=0.45, solid_capstyle="round")
    axes.plot([value], [row], "o", color=FIRST)


def as_svg(figure: Figure, name: str) -> str:
    """Return the figure as an SVG element: no prologue, no metadata, ids prefixed by `name`, colours as CSS variables."""
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

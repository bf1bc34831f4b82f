"""What every picture is drawn on: sizes, stand-in colours, and the way into a page as SVG.

Colours are names, not values: every picture is drawn in stand-in colours, which are then replaced by the page's CSS
variables, so that the same file reads well in light and in dark. Text stays text, in the page's own font. Equal numbers give
equal bytes. No window system and no global state of matplotlib is touched: a picture is drawn within `rc_context(STYLE)`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

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

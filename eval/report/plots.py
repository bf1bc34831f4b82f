"""A report's plots, as SVG elements to stand inside a page.

Everything is drawn in placeholder colours, which `as_svg` replaces by the page's CSS variables, so that the same file reads
well in light and in dark. Text stays text, in the page's own font. Equal numbers give equal bytes. No window system and no
global state of matplotlib is touched: a plot is drawn within `rc_context(STYLE)`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, product
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from configs.runtime.terminal import one_line
from eval.report.schema import CategorySection, Report
from eval.report.sections import ClosedSection, StoppingClass

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
LINES, COLOURS = ("-", "--", ":"), (FIRST, SECOND, THIRD, FOURTH)
PHASES = (
    ("draft", "draft", FIRST),
    ("verify", "target", SECOND),
    ("sample", "accept and draw", THIRD),
    ("overhead", "rest", FOURTH),
)


def draw_positions(report: Report) -> str:
    """Draw acceptance by draft position: given all before, survival, and the overlap of the two distributions."""
    acceptance = report.acceptance
    series = (
        ("given all before", acceptance.position_conditional, FIRST, "-", "o"),
        ("survival", acceptance.position_survival, SECOND, "-", "s"),
        ("overlap α", acceptance.overlap_alpha_by_position, THIRD, "--", "D"),
    )
    with _canvas(2.9) as (figure, axes):
        for label, values, colour, line, marker in series:
            axes.plot(range(1, len(values) + 1), _with_gaps(values), line, color=colour, marker=marker, label=label)
        return _by_position(figure, axes, "positions")


def draw_survival(reports: Mapping[str, Report]) -> str:
    """Draw, for each report by its label, the share of rounds that accepted at least so many drafts."""
    with _canvas(2.9) as (figure, axes):
        for (label, report), (line, colour), marker in zip(
            reports.items(), product(LINES, COLOURS), cycle("osD^"), strict=False
        ):
            values = report.acceptance.position_survival
            axes.plot(range(1, len(values) + 1), _with_gaps(values), line, color=colour, marker=marker, label=label)
        return _by_position(figure, axes, "survival")


def draw_histogram(report: Report) -> str:
    """Draw the share of rounds by number of accepted tokens."""
    counts = report.acceptance.accepted_histogram
    total = max(1, sum(counts))
    with _canvas(2.9) as (figure, axes):
        bars = axes.bar(range(len(counts)), [count / total for count in counts], color=FIRST, width=0.72)
        axes.bar_label(bars, [f"{100 * count / total:.0f} %" for count in counts], padding=2, color=INK)
        axes.set(xlabel="accepted tokens in a round", yticks=[])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines["left"].set_visible(False)
        axes.margins(y=0.12)
        return as_svg(figure, "histogram")


def draw_phases(report: Report) -> str | None:
    """Draw milliseconds per token by phase, plain against speculative; `None` where nothing was timed."""
    speed = report.speed
    if speed is None:
        return None
    rows = (
        ("plain", speed.phases_autoregressive, speed.decode_tokens_autoregressive),
        ("speculative", speed.phases, speed.decode_tokens_speculative),
    )
    with _canvas(2.2, grid="x") as (figure, axes):
        for row, (_, phases, num_tokens) in enumerate(rows):
            start = 0.0
            for name, label, colour in PHASES:
                width = 1000 * getattr(phases, f"{name}_seconds") / max(1, num_tokens)
                axes.barh(row, width, left=start, color=colour, height=0.56, label=label if row == 0 else None)
                start += width
            axes.annotate(f"{start:.1f}", (start, row), xytext=(4, 0), textcoords="offset points", va="center", color=INK)
        axes.set(xlabel="milliseconds per token", yticks=range(len(rows)), yticklabels=[label for label, _, _ in rows])
        axes.invert_yaxis()
        axes.margins(x=0.1)
        _legend_above(figure)
        return as_svg(figure, "phases")


def draw_predicted(report: Report) -> str | None:
    """Draw the expected decode speedup by batch size, a line for each number of drafts, and the measured one with its interval.

    `None` where no cost model was fitted.
    """
    speed = report.speed
    if speed is None or speed.predicted is None:
        return None
    shown = [each for each in speed.predicted.settings if each.context_tokens == speed.predicted.context_tokens]
    gammas = sorted({each.num_speculative_tokens for each in shown})
    largest = max((each.batch_size for each in speed.predicted.sweep), default=max(each.batch_size for each in shown))
    with _canvas(2.9) as (figure, axes):
        axes.axhline(1.0, **REFERENCE)
        for gamma, (line, colour) in zip(gammas, product(LINES, COLOURS), strict=False):
            points = sorted((each.batch_size, each.decode_speedup) for each in shown if each.num_speculative_tokens == gamma)
            timed = [point for point in points if point[0] <= largest]
            axes.plot(*zip(*timed, strict=True), line, color=colour, label=f"{gamma} draft{'s' * (gamma > 1)}")
            if beyond := points[len(timed) :]:  # extrapolated
                axes.plot(*zip(timed[-1], *beyond, strict=True), ":", color=colour, alpha=0.5, linewidth=1.0)
        batch_size, bounds = report.decode.batch_size, speed.decode_speedup_ci
        if bounds is not None:
            axes.plot([batch_size] * 2, bounds, color=INK, linewidth=1.4)
        if speed.decode_speedup is not None:
            axes.plot([batch_size], [speed.decode_speedup], "D", color=INK, label="measured")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(ylim=(0, None), xlabel="batch size")
        _legend_above(figure)
        return as_svg(figure, "predicted")


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


def draw_reliability(report: Report) -> str | None:
    """Draw the target's probability, and the share accepted, by class of the draft's confidence.

    The area of a point is the share of drafts in its class. `None` where no draft was compared.
    """
    lines = (("target's probability", "target_probability", FIRST), ("share kept", "accepted", SECOND))
    return _draw_classes(report.acceptance.reliability, lines, "the draft's own probability for its token", "reliability")


def draw_stopping(report: Report) -> str | None:
    """Draw the share accepted by the confidence that stopping rules read; `None` without a rule, or with no draft compared."""
    if report.decode.stopping is None:
        return None
    lines = (("share kept", "accepted", SECOND),)
    if report.decode.stopping.get("by") == "estimate":
        return _draw_classes(
            report.acceptance.estimate_reliability, lines, "the draft's estimate of its acceptance", "stopping"
        )
    return _draw_classes(report.acceptance.stopping_reliability, lines, "the distribution's largest probability", "stopping")


def _draw_classes(classes: Sequence[StoppingClass], lines: Sequence[tuple[str, str, str]], label: str, name: str) -> str | None:
    classes = [each for each in classes if each.num_drafts]
    if not classes:
        return None
    confidences: Any = [each.confidence for each in classes]
    most = max(each.num_drafts for each in classes)
    areas = [12 + 110 * each.num_drafts / most for each in classes]
    with _canvas(2.9) as (figure, axes):
        axes.plot([0, 1], [0, 1], **REFERENCE)
        for line, field, colour in lines:
            values: Any = [getattr(each, field) for each in classes]
            axes.plot(confidences, values, color=colour, label=line)
            axes.scatter(confidences, values, s=areas, color=colour, alpha=0.55, linewidths=0)
        axes.set(xlim=(0, 1), ylim=(0, 1.03), xlabel=label)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1.0))
        _legend_above(figure)
        return as_svg(figure, name)


# --- what all plots share -----------------------------------------------------------------------------------------


@contextmanager
def _canvas(height: float, grid: str = "y") -> Iterator[tuple[Figure, Axes]]:
    """Yield a figure of the common width, so many inches high, and its axes, with grid lines along one axis (`x` or `y`)."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots()
        axes.grid(False)
        axes.grid(True, axis=grid)  # type: ignore[arg-type]
        yield figure, axes


def _by_position(figure: Figure, axes: Axes, name: str) -> str:
    """Finish a plot of shares by draft position."""
    axes.set(ylim=(0, 1.03), xlabel="draft position")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _legend_above(figure)
    return as_svg(figure, name)


def _legend_above(figure: Figure) -> None:
    figure.legend(loc="outside upper left", ncols=4, columnspacing=1.4, handlelength=1.3, borderaxespad=0)


def _with_gaps(values: Sequence[float | None]) -> list[float]:
    """Replace `None` by NaN, at which matplotlib interrupts a line."""
    return [math.nan if value is None else value for value in values]


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

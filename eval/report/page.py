"""A report as one HTML page that needs no network: text, tables, plots and styles in one file.

The layout is `templates/page.html.j2` in the frame of all pages, `base.html.j2`. Everything from outside, such as a model's
answer, is escaped by the template engine and freed of control characters; the only markup let through is that of the plots.
These are SVG elements in placeholder colours, which `as_svg` replaces by the page's CSS variables, so that the same file reads
well in light and in dark.
"""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from configs.runtime.terminal import printable
from eval.report import text
from eval.report.schema import Report, definitions
from eval.report.tables import NUMBERS, PROVENANCE, flat_facts, report_tables

TEMPLATES = Path(__file__).with_name("templates")
SHOWN_OF_LOSSLESS = {"verdict", "checked_prompts", "divergences"}  # in the page's own words; the rest follows as a table
GOOD = {"lossless": "good", "lossless_up_to_ties": "good", "not_lossless": "bad"}
LEADING = ("decode_speedup", "tokens_per_target_step", "overlap_alpha")  # of the report's numbers
INK, FAINT, LINE = "#010101", "#020202", "#030303"
FIRST, SECOND, THIRD = "#040404", "#050505", "#060606"
VARIABLES = {  # of the page's style, by the colours of the plots' own (templates/plots.mplstyle)
    INK: "var(--ink)",
    FAINT: "var(--ink-soft)",
    LINE: "var(--line)",
    FIRST: "var(--series-1)",
    SECOND: "var(--series-2)",
    THIRD: "var(--series-3)",
}
SIZE = (5.0, 2.9)  # inches; narrow enough for the text to be readable when a phone scales the plot down


def render_html(report: Report) -> str:
    """Return the page of a report; equal reports give equal pages."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else printable(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        definitions=definitions(),
        number=text.number,
        eyebrow="draftsmith report",
        title=text.headline(report),
        subtitle=f"Draft {report.draft.path} for {report.target.name}: {text.settings(report)}.",
        warnings=text.warnings(report),
        cards=_cards(report),
        tables=report_tables(report),
        figures={"By draft position": Markup(draw_positions(report))},
        facts={name: list(flat_facts(value)) for name, value in _descriptions(report).items()},
        footer=f"schema version {report.schema_version}",
    )


def _cards(report: Report) -> list[dict[str, str]]:
    """Return the numbers that the page leads with; `path` is that of a number's definition."""
    cards = []
    for label, section, field, form in NUMBERS:
        if field in LEADING and (numbers := getattr(report, section)) is not None:
            point, bounds = numbers.interval_of(field)
            tone = ""
            if section == "speed" and bounds is not None and not bounds[0] <= 1 <= bounds[1]:
                tone = "good" if bounds[0] > 1 else "bad"
            number = {"path": f"{section}.{field}", "name": label.capitalize(), "value": form(point)}
            cards.append(number | {"below": text.interval(bounds), "tone": tone})
    verdict = report.lossless.verdict
    output = {"path": "lossless.verdict", "name": "Output", "value": text.VERDICTS[verdict], "tone": GOOD.get(verdict, "")}
    return [*cards, output | {"below": text.lossless_detail(report)}]


def _descriptions(report: Report) -> dict[str, Any]:
    values = report.to_dict()
    lossless = {key: value for key, value in values["lossless"].items() if key not in SHOWN_OF_LOSSLESS}
    prompts = {key: values["prompts"].get(key) for key in ("source", "sha256", "format", "num_asked", "num_trained_on")}
    made_by = {"command": " ".join(report.command or [])}
    found = {"losslessness": lossless, "prompts": prompts, **{name: values[name] for name in PROVENANCE}, "run": made_by}
    return {name: value for name, value in found.items() if value}


# --- the plot -----------------------------------------------------------------------------------------------------


def draw_positions(report: Report) -> str:
    """Draw acceptance by draft position: given all before, survival, and the overlap of the two distributions."""
    acceptance = report.acceptance
    series = (
        ("given all before", acceptance.position_conditional, FIRST, "-o"),
        ("survival", acceptance.position_survival, SECOND, "-s"),
        ("overlap α", acceptance.overlap_alpha_by_position, THIRD, "--D"),
    )
    with matplotlib.rc_context(fname=TEMPLATES / "plots.mplstyle"):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        for label, values, colour, line in series:
            shown = [math.nan if value is None else value for value in values]  # a line is interrupted at NaN
            axes.plot(range(1, len(shown) + 1), shown, line, color=colour, label=label)
        axes.set(ylim=(0, 1.03), xlabel="draft position")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        figure.legend(loc="outside upper left", ncols=4, columnspacing=1.4, handlelength=1.3, borderaxespad=0)
        return as_svg(figure)


def as_svg(figure: Figure) -> str:
    """Return the figure as an SVG element: no prologue, no metadata, colours as CSS variables."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r'^<svg([^>]*?) width="[^"]*" height="[^"]*"', r'<svg\1 aria-hidden="true"', svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg

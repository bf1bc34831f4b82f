"""Several reports as one HTML page, by the means of `eval.report.html`: the same styles, definitions, and freedom from the
network.

A report as one HTML page that needs no network: text, tables, pictures and styles in a single file.

The layout is `templates/report.html.j2`; `eval.report.html` makes its page by the same means. Everything from outside,
such as a model's answer, is escaped by the template engine; the only markup let through is the pictures drawn here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eval.report import text as wording
from eval.report.compare import FIXED, Entry, compare, in_words
from eval.report.definitions import DEFINITIONS
from eval.report.plots import (
    COLOURS,
    LINES,
    STYLE,
    as_svg,
    canvas,
    draw_categories,
    draw_histogram,
    draw_phases,
    draw_positions,
    draw_predicted,
    draw_reliability,
    draw_rows,
    draw_stopping,
    gaps,
    legend_above,
)
from eval.report.text import VERDICTS, warnings

TEMPLATES = Path(__file__).with_name("templates")
PROVENANCE = ("target", "draft", "decode", "statistics", "hardware", "versions", "git")


def render_page(report: Mapping[str, Any], previous: Mapping[str, Any] | None = None) -> str:
    """Return the page of a report; equal reports give equal pages.

    Args:
        report: a checked report (`eval.report.schema.check_report`).
        previous: a checked report of the draft before, to be shown beside it; of another target or other prompts, the page
            says that it cannot be compared with.
    """
    return render(
        "report.html.j2",
        report=report,
        headline=wording.headline(report),
        settings=wording.settings(report),
        warnings=wording.warnings(report),
        verdict=wording.VERDICTS[report["lossless"]["verdict"]],
        lossless_detail=wording.lossless_detail(report),
        lossless_facts=list(facts_of(_extras(report["lossless"]))),
        previous=previous,
        beside=None if previous is None else _beside(report, previous),
        in_words=in_words,
        sample_pairs=list(zip(report["samples"]["worst"], report["samples"]["best"], strict=True)),
        plots=as_pictures(_plots(report)),
        provenance={name: list(facts_of(report[name])) for name in PROVENANCE if report[name]},
    )


def _beside(report: Mapping[str, Any], previous: Mapping[str, Any]) -> Entry:
    """Return the report as an entry that is compared with the previous one, whatever that is of."""
    return compare([("previous", previous), ("report", report)], may_differ_in=FIXED)[1]


def render(template: str, **values: Any) -> str:
    """Fill in one of the templates: escaped throughout, strict about names, with the filters and definitions of all pages."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    helpers = (wording.number, wording.times, wording.percent, wording.interval)
    environment.filters.update({helper.__name__: helper for helper in helpers})
    return environment.get_template(template).render(definitions=DEFINITIONS, **values)


def as_pictures(plots: Mapping[str, str | None]) -> dict[str, Markup | None]:
    """Mark pictures drawn by `eval.report.plots` as the markup they are; matplotlib has escaped their text."""
    return {name: Markup(svg) if svg else None for name, svg in plots.items()}


def _plots(report: Mapping[str, Any]) -> dict[str, str | None]:
    return {
        "positions": draw_positions(report),
        "histogram": draw_histogram(report),
        "phases": draw_phases(report),
        "predicted": draw_predicted(report),
        "categories": draw_categories(report),
        "reliability": draw_reliability(report),
        "stopping": draw_stopping(report),
    }


def _extras(lossless: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the losslessness check reports beyond the fields that the page shows by themselves."""
    return {key: value for key, value in lossless.items() if key not in ("verdict", "checked_prompts", "divergences")}


def facts_of(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every leaf of nested descriptions, without those that are off or empty."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from facts_of(child, f"{name} {key}".strip())
    elif isinstance(value, list) and any(isinstance(child, Mapping) for child in value):
        for number, child in enumerate(value, 1):
            yield from facts_of(child, f"{name} {number}")
    elif value is not None and value != []:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


DESCRIPTIONS = ("target", "draft", "decode", "hardware", "versions", "git", "statistics")


def render_comparison(entries: Sequence[Entry]) -> str:
    """Return the page of reports that `eval.report.compare.compare` set side by side; equal reports give equal pages."""
    sections = {entry.letter: entry.report for entry in entries}
    return render(
        "comparison.html.j2",
        entries=entries,
        verdicts=VERDICTS,
        in_words=in_words,
        warnings={entry.letter: warnings(entry.report) for entry in entries},
        categories=list(dict.fromkeys(name for entry in entries for name in entry.report["by_category"])),
        baselines=list(dict.fromkeys(name for entry in entries for name in entry.report["baselines"])),
        differing=_differing(entries),
        plots=as_pictures({"rows": draw_rows(sections, "rows"), "survival": draw_survival(entries)}),
    )


def draw_survival(entries: Sequence[Entry]) -> str:
    """Draw, for each report, the share of rounds that accepted at least so many drafts."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(2.9)
        for entry, (line, colour), marker in zip(entries, product(LINES, COLOURS), cycle("osD^"), strict=False):
            values = entry.report["acceptance"]["position_survival"]
            axes.plot(range(1, len(values) + 1), gaps(values), line, color=colour, marker=marker, label=entry.letter)
        axes.set(ylim=(0, 1.03), xlabel="draft position")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        legend_above(figure)
        return as_svg(figure, "survival")


def _differing(entries: Sequence[Entry]) -> list[tuple[str, list[str]]]:
    """Return the descriptions in which not all reports agree: name, and each report's own, in their order."""
    described = [dict(facts_of(_descriptions(entry.report))) for entry in entries]
    names = dict.fromkeys(name for facts in described for name in facts)
    rows = [(name, [facts.get(name, "") for facts in described]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _descriptions(report: Mapping[str, Any]) -> dict[str, Any]:
    prompts = {key: report["prompts"][key] for key in ("source", "sha256", "num_asked", "num_prompts")}
    return {"prompts": prompts, **{name: report[name] for name in DESCRIPTIONS if report[name]}}

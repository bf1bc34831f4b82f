"""A report as one HTML page that needs no network: text, tables, pictures and styles in a single file.

The layout is `templates/report.html.j2`. Everything from outside, such as a model's answer, is escaped by the template
engine; the only markup let through is the pictures drawn here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval import wording
from eval.definitions import DEFINITIONS
from eval.plots import draw_categories, draw_histogram, draw_phases, draw_positions

TEMPLATES = Path(__file__).with_name("templates")
PROVENANCE = ("target", "draft", "decode", "statistics", "hardware", "versions", "git")


def render_page(report: Mapping[str, Any]) -> str:
    """Return the page of a checked report (`eval.report_schema.check_report`); equal reports give equal pages."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    helpers = (wording.number, wording.times, wording.percent, wording.interval)
    environment.filters.update({helper.__name__: helper for helper in helpers})
    return environment.get_template("report.html.j2").render(
        report=report,
        headline=wording.headline(report),
        settings=wording.settings(report),
        warnings=wording.warnings(report),
        verdict=wording.VERDICTS[report["lossless"]["verdict"]],
        lossless_detail=wording.lossless_detail(report),
        lossless_facts=list(_facts(_extras(report["lossless"]))),
        sample_pairs=list(zip(report["samples"]["worst"], report["samples"]["best"], strict=True)),
        plots={name: Markup(svg) if svg else None for name, svg in _plots(report).items()},
        provenance={name: list(_facts(report[name])) for name in PROVENANCE if report[name]},
        definitions=DEFINITIONS,
    )


def _plots(report: Mapping[str, Any]) -> dict[str, str | None]:
    return {
        "positions": draw_positions(report),
        "histogram": draw_histogram(report),
        "phases": draw_phases(report),
        "categories": draw_categories(report),
    }


def _extras(lossless: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the losslessness check reports beyond the fields that the page shows by themselves."""
    return {key: value for key, value in lossless.items() if key not in ("verdict", "checked_prompts", "divergences")}


def _facts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every leaf of nested descriptions, without those that are off or empty."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _facts(child, f"{name} {key}".strip())
    elif isinstance(value, list) and any(isinstance(child, Mapping) for child in value):
        for number, child in enumerate(value, 1):
            yield from _facts(child, f"{name} {number}")
    elif value is not None and value != []:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)

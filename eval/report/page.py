"""A report as one HTML page that needs no network: text, tables, plots and styles in one file.

The layout is `templates/page.html.j2`. Everything from outside, such as a model's answer, is escaped by the template engine and
freed of control characters; the only markup let through is that of the plots.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from configs.runtime.terminal import printable
from eval.report import plots, text
from eval.report.schema import Report, definitions
from eval.report.tables import PROVENANCE, TERMS, flat_facts, report_tables

TEMPLATES = Path(__file__).with_name("templates")
SHOWN_OF_LOSSLESS = {"verdict", "checked_prompts", "divergences"}  # in the page's own words; the rest follows as a table
GOOD = {"lossless": "good", "lossless_up_to_ties": "good", "not_lossless": "bad"}


@dataclass(frozen=True, kw_only=True)
class Card:
    """A number that the page leads with; `path` is that of its definition."""

    path: str
    name: str
    value: str
    below: str
    tone: str = ""


def render_html(report: Report) -> str:
    """Return the page of a report; equal reports give equal pages."""
    return render_page(
        eyebrow="draftsmith report",
        title=text.headline(report),
        subtitle=f"Draft {report.draft.path} for {report.target.name}: {text.settings(report)}.",
        warnings=text.warnings(report),
        cards=_cards(report),
        tables=report_tables(report),
        figures={
            "By draft position": Markup(plots.draw_positions(report)),
            "By category": Markup(plots.draw_rows(report.by_category, "categories")),
        },
        answers=[(each.prompt, [each.autoregressive, each.speculative]) for each in report.rendered],
        answer_columns=["plain", "speculative"],
        samples=[each for pair in zip(report.samples["worst"], report.samples["best"], strict=True) for each in pair],
        facts={name: list(flat_facts(value)) for name, value in _descriptions(report).items()},
        footer=f"schema version {report.schema_version}",
    )


def _cards(report: Report) -> list[Card]:
    cards = []
    if (speed := report.speed) is not None:
        bounds = speed.decode_speedup_ci
        tone = "" if bounds is None or bounds[0] <= 1 <= bounds[1] else "good" if bounds[0] > 1 else "bad"
        value = text.times(speed.decode_speedup)
        cards.append(
            Card(path="speed.decode_speedup", name="Decode speedup", value=value, below=text.interval(bounds), tone=tone)
        )
    for name, field in (("Tokens per target step (τ)", "tokens_per_target_step"), ("Acceptance rate (α)", "overlap_alpha")):
        point, bounds = report.acceptance.interval_of(field)
        cards.append(Card(path=f"acceptance.{field}", name=name, value=text.number(point), below=text.interval(bounds)))
    verdict, detail = report.lossless.verdict, text.lossless_detail(report)
    shown = text.VERDICTS[verdict]
    return [*cards, Card(path="lossless.verdict", name="Output", value=shown, below=detail, tone=GOOD.get(verdict, ""))]


def _descriptions(report: Report) -> dict[str, Any]:
    """Return what says how the report came about, by name."""
    values = report.to_dict()
    lossless = {key: value for key, value in values["lossless"].items() if key not in SHOWN_OF_LOSSLESS}
    prompts = {key: values["prompts"].get(key) for key in ("source", "sha256", "format", "num_asked", "num_trained_on")}
    made_by = {"command": " ".join(report.command or [])}
    found = {"losslessness": lossless, "prompts": prompts, **{name: values[name] for name in PROVENANCE}, "run": made_by}
    return {name: value for name, value in found.items() if value}


def render_page(**values: Any) -> str:
    """Fill in the template, of a report or a comparison: everything is escaped, and a name that is not given is an error."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else printable(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(definitions=definitions(), terms=TERMS, number=text.number, **values)

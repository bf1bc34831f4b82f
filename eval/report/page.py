"""A report, or several side by side, as one HTML page that needs no network: text, tables, plots and styles in one file.

The layout is `templates/page.html.j2`. Everything from outside, such as a model's answer, is escaped by the template engine and
freed of control characters; the only markup let through is that of the plots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from configs.runtime.terminal import printable
from eval.report import plots, text
from eval.report.comparison import FIXED, ComparedReport, compare, comparison_tables, notes, overview
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


def render_html(report: Report, previous: Report | None = None) -> str:
    """Return the page of a report; equal reports give equal pages.

    Args:
        report: the report.
        previous: a report of the previous draft, to compare with; where target or prompts differ, the page says so.
    """
    tables = report_tables(report)
    if previous is not None:
        entries = compare([("the previous draft", previous), ("this draft", report)], may_differ_in=FIXED)
        run = f"A is {previous.draft.path}, measured by a run of its own."
        note = " ".join([run, *(f"{each}." for each in notes(entries))])
        tables.append(replace(overview(entries), title="Against the previous draft", note=note))
    return _render(
        eyebrow="draftsmith report",
        title=text.headline(report),
        subtitle=f"Draft {report.draft.path} for {report.target.name}: {text.settings(report)}.",
        warnings=text.warnings(report),
        cards=_cards(report),
        tables=tables,
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


def render_comparison(entries: Sequence[ComparedReport]) -> str:
    """Return the page of the reports compared by `eval.report.comparison.compare`; equal reports give equal pages."""
    reports = {entry.letter: entry.report for entry in entries}
    by_prompt = [{each.prompt_id: each for each in report.rendered} for report in reports.values()]
    shared = [prompt_id for prompt_id in by_prompt[0] if all(prompt_id in each for each in by_prompt)]
    first, *others = comparison_tables(entries)
    return _render(
        eyebrow="draftsmith comparison",
        title=f"{len(entries)} reports side by side",
        subtitle="The others are compared with A: τ prompt by prompt, speed batch by batch. A change is significant where the "
        "whole interval of the ratio lies on one side of 1.",
        warnings=[f"{letter}: {sentence}" for letter, report in reports.items() for sentence in text.warnings(report)],
        cards=[],
        tables=[replace(first, note=" ".join(f"{each}." for each in notes(entries))), *others],
        figures={first.title: Markup(plots.draw_rows(reports, "rows"))},
        answers=[
            (by_prompt[0][name].prompt, [by_prompt[0][name].autoregressive, *(each[name].speculative for each in by_prompt)])
            for name in shared
        ],
        answer_columns=["plain", *(f"{entry.letter}: {text.VERDICTS[entry.report.lossless.verdict]}" for entry in entries)],
        samples=[],
        facts={},
        footer=f"{len(entries)} reports",
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


def _render(**values: Any) -> str:
    """Fill in the template: everything is escaped, and a name that is not given is an error."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else printable(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(definitions=definitions(), terms=TERMS, number=text.number, **values)

"""A report, or several side by side, as one HTML page that needs no network: text, tables, plots and styles in one file.

The layouts are `templates/report.html.j2` and `templates/comparison.html.j2`. Everything from outside, such as a model's
answer, is escaped by the template engine and freed of control characters; the only markup let through is that of the plots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from configs.runtime.terminal import printable
from eval.report import plots, text
from eval.report.compare import FIXED, ComparedReport, compare, in_words
from eval.report.schema import Report, definitions

TEMPLATES = Path(__file__).with_name("templates")
PROVENANCE = ("target", "draft", "decode", "statistics", "hardware", "versions", "git")
SHOWN_OF_LOSSLESS = {"verdict", "checked_prompts", "divergences"}  # in the page's own words; the rest follows as a table


def render_html(report: Report, previous: Report | None = None) -> str:
    """Return the page of a report; equal reports give equal pages.

    Args:
        report: the report.
        previous: a report of the previous draft, to be shown beside it; where its target or prompts differ, the page says
            that the two cannot be compared.
    """
    values = report.to_dict()
    return _render(
        "report.html.j2",
        report=report,
        headline=text.headline(report),
        weakest=text.weakest_category(report),
        pace=text.milliseconds_a_token(report),
        lookup_gain=text.lookup_gain(report),
        suites=[(name, each, text.fastest_free(each)) for name, each in text.by_suite(report).items()],
        settings=text.settings(report),
        warnings=text.warnings(report),
        failed=text.failed_requests(report),
        verdict=text.VERDICTS[report.lossless.verdict],
        lossless_detail=text.lossless_detail(report),
        lossless_facts=[
            fact for key, value in values["lossless"].items() if key not in SHOWN_OF_LOSSLESS for fact in _facts(value, key)
        ],
        previous=previous,
        beside=None if previous is None else compare([("previous", previous), ("report", report)], may_differ_in=FIXED)[1],
        sample_pairs=list(zip(report.samples["worst"], report.samples["best"], strict=True)),
        plots=_markup(
            positions=plots.draw_positions(report),
            histogram=plots.draw_histogram(report),
            phases=plots.draw_phases(report),
            predicted=plots.draw_predicted(report),
            categories=plots.draw_rows(report.by_category, "categories"),
            reliability=plots.draw_reliability(report),
            stopping=plots.draw_stopping(report),
        ),
        provenance={name: list(_facts(values[name])) for name in PROVENANCE if values[name]},
    )


def render_comparison(entries: Sequence[ComparedReport]) -> str:
    """Return the page of the reports compared by `eval.report.compare.compare`; equal reports give equal pages."""
    reports = {entry.letter: entry.report for entry in entries}
    return _render(
        "comparison.html.j2",
        entries=entries,
        verdicts=text.VERDICTS,
        warnings={letter: text.warnings(report) for letter, report in reports.items()},
        categories=list(dict.fromkeys(name for report in reports.values() for name in report.by_category)),
        baselines=list(dict.fromkeys(name for report in reports.values() for name in report.baselines)),
        differing=_differing(list(reports.values())),
        answers=_beside(list(reports.values())),
        **_worth(list(reports.values())),
        plots=_markup(rows=plots.draw_rows(reports, "rows"), survival=plots.draw_survival(reports)),
    )


def _beside(reports: Sequence[Report]) -> list[tuple[str, list[str]]]:
    """Return the prompts that all reports have rendered answers to, each with the plain one and that of every report."""
    by_prompt = [{each.prompt_id: each for each in report.rendered} for report in reports]
    shared = [prompt_id for prompt_id in by_prompt[0] if all(prompt_id in each for each in by_prompt)]
    return [
        (by_prompt[0][name].prompt, [by_prompt[0][name].autoregressive, *(each[name].speculative for each in by_prompt)])
        for name in shared
    ]


def _worth(reports: Sequence[Report]) -> dict[str, Any]:
    """Return the scorers that all reports have, and their distances from the references where all have one."""
    judged = [report.quality for report in reports if report.quality is not None]
    if len(judged) < len(reports):
        return {"quality": [], "distances": []}
    distances = [each.feature_distance for each in judged if each.feature_distance is not None]
    known = len(distances) == len(judged) and all(each.autoregressive is not None for each in distances)
    shared = [name for name in judged[0].scores if all(name in each.scores for each in judged)]
    return {"quality": shared, "distances": distances if known else []}


def _render(template: str, **values: Any) -> str:
    """Fill in a template: everything is escaped, and a name that is not given is an error."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else printable(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (text.number, text.times, text.percent, text.interval)
    environment.filters.update({each.__name__: each for each in filters})
    return environment.get_template(template).render(definitions=definitions(), in_words=in_words, **values)


def _markup(**svgs: str | None) -> dict[str, Markup | None]:
    """Mark plots as the markup they are; matplotlib has escaped their text."""
    return {name: Markup(svg) if svg else None for name, svg in svgs.items()}


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


def _differing(reports: Sequence[Report]) -> list[tuple[str, list[str]]]:
    """Return the descriptions in which not all reports agree: name, and each report's own, in their order."""
    described = []
    for report in reports:
        prompts = report.prompts.model_dump(include={"source", "sha256", "num_asked", "num_prompts"})
        values = report.model_dump(include=set(PROVENANCE), exclude_unset=True)
        described.append(dict(_facts({"prompts": prompts, **values})))
    names = dict.fromkeys(name for facts in described for name in facts)
    rows = [(name, [facts.get(name, "") for facts in described]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]

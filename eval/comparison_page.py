"""Several reports as one HTML page, by the means of `eval.page`: the same styles, definitions, and freedom from the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, product
from typing import Any

import matplotlib
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eval.canvas import STYLE, as_svg, canvas, gaps, legend_above
from eval.comparison import Entry, in_words
from eval.page import as_pictures, facts_of, render
from eval.plots import COLOURS, LINES, draw_rows
from eval.wording import VERDICTS, warnings

DESCRIPTIONS = ("target", "draft", "decode", "hardware", "versions", "git", "statistics")


def render_comparison(entries: Sequence[Entry]) -> str:
    """Return the page of reports that `eval.comparison.compare` set side by side; equal reports give equal pages."""
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

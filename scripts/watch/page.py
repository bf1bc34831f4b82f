"""A run as a page, `OUTPUT/index.html`, written anew while the run goes: the look of a report's page, and like it in one file.

It asks no network but itself, every `REFRESH_SECONDS` until the run is over. Its one script says for how long it was not
written, which the page of a run that was killed cannot say otherwise.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from configs.runtime.files import write_text
from eval.report.page import FIRST, SECOND, draw, fill_template
from eval.report.text import VERDICTS, headline, interval, number, speedup_of, times
from scripts.watch import text
from scripts.watch.reading import read_run
from scripts.watch.state import PAGE, SILENT_SECONDS, Point, Run, Stage

REFRESH_SECONDS = 10
SECONDS_BETWEEN_PAGES = 5.0
TEMPLATES = Path(__file__).with_name("templates")
DRAWN_POINTS = 400  # of a curve; of more, neighbours are averaged
TONES = {"pass": "good", "fail": "bad"}
STAGE_TONES = {"done": "good", "failed": "bad"}


@contextmanager
def page_kept(output: Path, seconds: float | None = None) -> Iterator[None]:
    """Write the page of a run every few seconds while the block goes on, and once more when it has ended."""
    over = threading.Event()

    def keep() -> None:
        while not over.is_set():
            write_page(output)
            over.wait(SECONDS_BETWEEN_PAGES if seconds is None else seconds)

    thread = threading.Thread(target=keep, name="page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        write_page(output, goes_on=False)


def write_page(output: Path, *, goes_on: bool = True) -> None:
    """Write the page of a run as it is now, if its folder is there; one that cannot be written stops nothing."""
    with suppress(Exception):
        if output.is_dir():
            run = read_run(output)
            run = run if goes_on else replace(run, is_locked=False, silent_seconds=math.inf)  # the lock is this process's own
            write_text(output / PAGE, render_run(run))


def render_run(run: Run) -> str:
    """Return the page of a run."""
    warnings = [silence for silence in [text.silence(run)] if silence and run.state == "running"]
    return fill_template(
        "run.html.j2",
        TEMPLATES,
        eyebrow="draftsmith run",
        title=text.headline(run),
        subtitle=text.subtitle(run),
        warnings=warnings + [f"The gate: {each}" for each in text.failed_checks(run)],
        refresh=None if run.is_over else REFRESH_SECONDS,
        cards=_cards(run),
        measured="" if run.report is None else headline(run.report),
        outlook=text.outlook(run),
        stages=[_row(run, stage) for stage in run.stages],
        figures=_figures(run),
        samples=[] if run.samples is None else run.samples.samples,
        sample_step=None if run.samples is None else run.samples.step,
        check=None if run.check is None else run.check.table(),
        choices=[each for each in run.choices if each.key != "minutes"],  # which are in the table of the stages
        time=run.time,
        silent_seconds=SILENT_SECONDS,
        links=[(what, quote(path)) for what, path in run.links.items()],
        footer=f"Written {datetime.fromtimestamp(run.time, UTC):%Y-%m-%d %H:%M:%S} UTC"
        + ("" if run.is_over else f"; loaded again every {REFRESH_SECONDS} seconds"),
    )


def _cards(run: Run) -> list[dict[str, str]]:
    """Return the numbers that the page leads with: how far it is, and once it was measured, what it came to."""
    cards = []
    if run.gate is not None:
        tone = TONES.get(run.gate.outcome, "")
        cards.append({"name": "Verdict of the gate", "value": run.gate.outcome, "tone": tone, "below": ""})
    if run.report is not None:
        value, bounds = run.report.acceptance.interval_of("tokens_per_target_step")
        cards.append({"name": "Tokens per target step (τ)", "value": number(value), "below": interval(bounds)})
        ratio, bounds = speedup_of(run.report)
        cards.append({"name": "Decode speedup", "value": times(ratio), "below": interval(bounds)})
        cards.append({"name": "Output", "value": VERDICTS[run.report.lossless.verdict], "below": ""})
    if run.seconds_left is not None:
        cards.append({"name": "Time left in all", "value": text.time_left(run), "below": "h:mm:ss, by plan and progress"})
    if run.report is None and run.best is not None:
        below = f"at step {run.best.step:,}; last {text.at(run.taus[-1])}"
        cards.append({"name": "Best τ on held-out prompts", "value": number(run.best.value), "below": below})
    if run.report is None and run.losses:
        below = f"at step {run.losses[-1].step:,}; first {text.at(run.losses[0])}"
        cards.append({"name": "Loss", "value": number(run.losses[-1].value), "below": below})
    return cards


def _row(run: Run, stage: Stage) -> dict[str, Any]:
    """Return a stage as a row of the table; `share` draws a bar."""
    is_running = stage is run.running
    return {
        "name": stage.name,
        "state": text.state(stage),
        "kind": stage.state,
        "tone": "" if stage.code and stage.state == "done" else STAGE_TONES.get(stage.state, ""),
        "planned": text.minutes(stage.planned_minutes),
        "used": text.minutes(stage.used_minutes),
        "progress": text.stage_progress(run) if is_running else "",
        "share": run.progress.share if is_running and run.progress is not None else None,
    }


# --- curves -------------------------------------------------------------------------------------------------------


def _figures(run: Run) -> list[tuple[str, Markup]]:
    """Return what has two points or more as a caption and a drawing."""
    found = []
    if len(run.losses) > 1:
        found.append((f"Loss by step; {text.at(run.losses[-1])}", Markup(draw_curve(run.losses, None, FIRST))))
    if len(run.taus) > 1:
        caption = f"τ on held-out prompts; the best, {text.at(run.best)}, is kept"
        found.append((caption, Markup(draw_curve(run.taus, run.best, SECOND))))
    return found


@lru_cache(maxsize=4)  # the page is written more often than the curves change
def draw_curve(points: tuple[Point, ...], marked: Point | None, colour: str) -> str:
    """Draw values by step, one of them marked."""

    def fill(figure: Figure, axes: Axes) -> None:
        drawn = thinned(points)
        axes.plot(*zip(*drawn, strict=True), "-o" if len(drawn) < 40 else "-", color=colour, markersize=3.5)
        if marked is not None:
            axes.plot([marked.step], [marked.value], "o", color=colour, markersize=9)
            axes.annotate(number(marked.value), marked, xytext=(0, 8), textcoords="offset points", ha="center")
            axes.margins(y=0.18)
        axes.set(xlabel="step")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))

    return draw(fill, height=2.6)


def thinned(points: tuple[Point, ...]) -> list[Point]:
    """Return a curve of at most `DRAWN_POINTS` points, each the mean of neighbours."""
    size = math.ceil(len(points) / DRAWN_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [Point(group[-1].step, fmean(point.value for point in group)) for group in groups]

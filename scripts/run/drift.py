"""`draftsmith run --from ARTIFACT --prompts LOG --drift`: tau of the served draft by week of the log. Nothing is trained."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from configs.runtime.errors import InputError
from configs.runtime.files import new_folder, write_json, write_text
from configs.schema.commands.running import RunConfig
from configs.schema.evaluation import EvalConfig, SuiteConfig
from distill.dataset.conversations import text_hash
from scripts.run.log import ServedLog, ServedPrompt, newest, read_log
from scripts.run.mix import find_served, known_prompts, settings_of
from scripts.run.stages import ENTRIES, evaluation_of_served
from scripts.run.steps import run_step

log = logging.getLogger("draftsmith")
NUM_WEEKS = 12  # the newest


def measure_drift(run: RunConfig) -> int:
    """Measure the served draft by week of the log, a suite of one report each; return the exit code."""
    served, _ = find_served(run)
    folder = Path(run.output) / "drift"
    write_weeks(run, served, read_log(run), folder / "weeks")
    weeks = [SuiteConfig(name=path.stem, path=str(path), on_too_long="skip") for path in sorted((folder / "weeks").iterdir())]
    config = folder / "eval.json"
    write_json(config, evaluation_of_served(run, weeks, folder / "eval").model_dump(mode="json"))
    return run_step([ENTRIES[EvalConfig], "--config", str(config)])


def write_weeks(run: RunConfig, served: Path, read: ServedLog, folder: Path) -> None:
    """Write a suite for each of the newest weeks with enough prompts that the draft was not trained on."""
    if missing := read.without_time:
        words = f"{len(missing)} of {len(read.rows)} rows do not say when they were served"
        message = f"refresh.time_field: {words}, {missing[0]} for one"
        if len(missing) == len(read.rows):
            raise InputError(f"{message}; drift is counted by week: name the key that has the time, in seconds or ISO 8601")
        log.warning("%s; they are in no week", message)
    suites, too_few = _weeks(run, known_prompts(served), read)
    least, found = settings_of(run).min_prompts, ", ".join(f"{week} {count}" for week, count in too_few.items())
    if not suites:
        raise InputError(
            f"refresh.min_prompts: no week of the log has {least} prompts that the draft was not trained on ({found}); ask for "
            "fewer"
        )
    if too_few:
        log.warning("not measured, for fewer than %d prompts: %s", least, found)
    with new_folder(folder) as scratch:
        for week, rows in suites.items():
            write_text(scratch / f"{week}.jsonl", "".join(row.to_line() for row in rows))


def _weeks(run: RunConfig, known: set[int], read: ServedLog) -> tuple[dict[str, list[ServedPrompt]], dict[str, int]]:
    """Return the prompts to measure by week, spread evenly over it, and how many the weeks have that have too few."""
    settings = settings_of(run)
    by_week: dict[str, list[ServedPrompt]] = defaultdict(list)
    for row in read.rows:
        if row.time is not None:
            by_week["{}-W{:02d}".format(*row.time.isocalendar())].append(row)
    suites: dict[str, list[ServedPrompt]] = {}
    too_few: dict[str, int] = {}
    for week in sorted(by_week)[-NUM_WEEKS:]:
        # The first turns, because conversations that begin alike are one prompt then.
        firsts = [replace(row, prompt=replace(row.prompt, turns=row.prompt.turns[:1])) for row in by_week[week]]
        rows = newest(read, firsts, len(firsts))
        unknown = [row for row in rows if known.isdisjoint(map(text_hash, row.prompt.user_texts))]
        if len(unknown) < settings.min_prompts:
            too_few[week] = len(unknown)
            continue
        step = max(1.0, len(unknown) / settings.prompts_per_week)
        suites[week] = [unknown[int(place * step)] for place in range(min(len(unknown), settings.prompts_per_week))]
    return suites, too_few

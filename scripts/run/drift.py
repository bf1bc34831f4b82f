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
    """Write a suite for each of the newest weeks with enough prompts that the draft was not trained on, spread over it."""
    settings, known = settings_of(run), known_prompts(served)
    by_week: dict[str, list[ServedPrompt]] = defaultdict(list)
    for row in read.rows:
        if row.time is not None:
            # The first turn, because conversations that begin alike are one prompt then.
            first = replace(row, prompt=replace(row.prompt, turns=row.prompt.turns[:1]))
            by_week["{}-W{:02d}".format(*row.time.isocalendar())].append(first)
    suites: dict[str, list[ServedPrompt]] = {}
    for week in sorted(by_week)[-NUM_WEEKS:]:
        rows = newest(read, by_week[week], len(by_week[week]))
        unknown = [row for row in rows if known.isdisjoint(map(text_hash, row.prompt.user_texts))]
        if len(unknown) < settings.min_prompts:
            log.warning("%s is not measured: it has %d prompts that the draft was not trained on", week, len(unknown))
            continue
        step = max(1.0, len(unknown) / settings.prompts_per_week)
        suites[week] = [unknown[int(place * step)] for place in range(min(len(unknown), settings.prompts_per_week))]
    without_time = f"{read.num_without_time} of {len(read.rows)} rows have no time that can be read (refresh.time_field)"
    if not suites:
        raise InputError(
            f"refresh.min_prompts: no week of the log has {settings.min_prompts} prompts that the draft was not trained on; "
            f"{without_time}"
        )
    if read.num_without_time:
        log.warning("%s; they are in no week", without_time)
    with new_folder(folder) as scratch:
        for week, rows in suites.items():
            write_text(scratch / f"{week}.jsonl", "".join(row.to_line() for row in rows))

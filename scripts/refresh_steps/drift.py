"""Drift seen without training: the served draft decodes prompts of each week of the log."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from configs.runtime.errors import InputError
from configs.runtime.files import new_folder, read_object, write_json, write_text
from configs.schema.commands.refreshing import RefreshConfig
from configs.schema.evaluation import SuiteConfig
from distill.dataset.conversations import text_hash
from scripts.refresh_steps.commands import call_with, plain_eval
from scripts.refresh_steps.mixing import known_prompts
from scripts.refresh_steps.results import write_drift
from scripts.refresh_steps.resuming import Step, end, run_steps
from scripts.refresh_steps.traffic import ServedPrompt, Traffic, newest, read_traffic

log = logging.getLogger("draftsmith")
COUNTS = "counts.json"


def measure_drift(config: RefreshConfig, served: Path, served_sha256: str) -> int:
    """Write `drift.json` and `drift.md`; return the exit code.

    Raises:
        InputError: the log cannot be read, no row says when it was served, or no week has enough prompts.
    """
    output = Path(config.output)
    folder, weeks = output / "drift", output / "drift" / "weeks"

    def measure() -> int:
        suites = [SuiteConfig(name=path.stem, path=str(path), on_too_long="skip") for path in sorted(weeks.glob("*.jsonl"))]
        return call_with(plain_eval(config, served, suites, folder / "eval"), "drift", output)

    decided = config.model_dump(mode="json", include={"target", "decode", "lossless", "bootstrap_samples", "repeats"})
    steps = [
        Step(
            name="weeks of the log",
            folder=weeks,
            decided_by=[config.log.model_dump(), config.drift.model_dump(), served_sha256],
            run=lambda: write_weeks(config, served, weeks),
        ),
        Step(name="measure each week", folder=folder / "eval", decided_by=decided, run=measure),
    ]
    code = run_steps(folder, steps, [Path(config.log.path)])
    if code == 0:
        found = read_object(weeks / COUNTS, "counts of the log")
        write_drift(output, folder / "eval" / "report.json", found["too_few"], found["traffic"])
        end(folder)
    return code


def write_weeks(config: RefreshConfig, served: Path, folder: Path) -> int:
    """Write a suite for each of the newest weeks with enough prompts, and what was counted."""
    traffic = read_traffic(config)
    if traffic.first_without_time is not None:
        words = f"{traffic.num_without_time} of {len(traffic.rows)} rows do not say when they were served"
        message = f"log.time_field: {words}, {traffic.first_without_time} for one"
        if traffic.num_without_time == len(traffic.rows):
            raise InputError(f"{message}; drift is counted by week: name the key that has the time, in seconds or ISO 8601")
        log.warning("%s; they are in no week", message)
    suites, too_few = _weeks(config, served, traffic)
    if not suites:
        found = ", ".join(f"{week} {count}" for week, count in too_few.items())
        raise InputError(
            f"drift.min_prompts: no week of the log has {config.drift.min_prompts} prompts that the draft was not trained on "
            f"({found}); ask for fewer"
        )
    with new_folder(folder) as scratch:
        for week, rows in suites.items():
            write_text(scratch / f"{week}.jsonl", "".join(row.to_line() for row in rows))
        write_json(scratch / COUNTS, {"too_few": too_few, "traffic": traffic.counts()})
    return 0


def _weeks(config: RefreshConfig, served: Path, traffic: Traffic) -> tuple[dict[str, list[ServedPrompt]], dict[str, int]]:
    """Return the prompts to measure by week, and how many the weeks have that have too few."""
    known = known_prompts(served)
    by_week: dict[str, list[ServedPrompt]] = defaultdict(list)
    for row in traffic.rows:
        if row.time is None:
            continue
        by_week["{}-W{:02d}".format(*row.time.isocalendar())].append(row)
    suites: dict[str, list[ServedPrompt]] = {}
    too_few: dict[str, int] = {}
    for week in sorted(by_week)[-config.drift.num_weeks :]:
        # First, because conversations that begin alike are one prompt then.
        firsts = [replace(row, prompt=replace(row.prompt, turns=row.prompt.turns[:1])) for row in by_week[week]]
        rows = newest(traffic, firsts, config.log, len(firsts))
        unknown = [row for row in rows if known.isdisjoint(map(text_hash, row.prompt.user_texts))]
        traffic.dropped["trained_on"] += len(rows) - len(unknown)
        if len(unknown) < config.drift.min_prompts:
            too_few[week] = len(unknown)
            continue
        step = max(1.0, len(unknown) / config.drift.prompts_per_week)
        suites[week] = [unknown[int(place * step)] for place in range(min(len(unknown), config.drift.prompts_per_week))]
    return suites, too_few

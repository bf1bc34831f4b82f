"""Drift seen without training: the served draft decodes prompts of each week of the log."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.runtime.command import DONE
from configs.runtime.errors import InputError
from configs.runtime.files import new_folder, write_json, write_text
from configs.runtime.terminal import say
from configs.schema.commands.refreshing import RefreshConfig
from configs.schema.evaluation import SuiteConfig
from distill.dataset.conversations import text_hash
from eval.report.markdown import table
from eval.report.schema import Report, SuiteSection, load_report
from eval.report.text import interval, number
from scripts.refresh_steps.commands import call_with, plain_eval
from scripts.refresh_steps.mixing import known_prompts
from scripts.refresh_steps.traffic import ServedPrompt, Traffic, newest, read_traffic

log = logging.getLogger("draftsmith")


def measure_drift(config: RefreshConfig, served: Path) -> int:
    """Write `drift.json` and `drift.md`: tau of the served draft by week; return the exit code."""
    output, folder = Path(config.output), Path(config.output) / "drift"
    traffic = read_traffic(config)
    too_few = write_weeks(config, served, traffic, folder / "weeks")
    weeks = sorted((folder / "weeks").glob("*.jsonl"))
    suites = [SuiteConfig(name=path.stem, path=str(path), on_too_long="skip") for path in weeks]
    code = call_with(plain_eval(config, served, suites, folder / "eval"), "drift", output)
    if code == DONE:
        _write_results(output, folder / "eval" / "report.json", too_few, traffic)
    return code


def write_weeks(config: RefreshConfig, served: Path, traffic: Traffic, folder: Path) -> dict[str, int]:
    """Write a suite for each of the newest weeks with enough prompts; return how many those have that have too few."""
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
    return too_few


def _weeks(config: RefreshConfig, served: Path, traffic: Traffic) -> tuple[dict[str, list[ServedPrompt]], dict[str, int]]:
    """Return the prompts to measure by week, and how many the weeks have that have too few."""
    known = known_prompts(served)
    by_week: dict[str, list[ServedPrompt]] = defaultdict(list)
    for row in traffic.rows:
        if row.time is not None:
            by_week["{}-W{:02d}".format(*row.time.isocalendar())].append(row)
    suites: dict[str, list[ServedPrompt]] = {}
    too_few: dict[str, int] = {}
    for week in sorted(by_week)[-config.drift.num_weeks :]:
        # The first turns, because conversations that begin alike are one prompt then.
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


def _write_results(output: Path, report: Path, too_few: dict[str, int], traffic: Traffic) -> None:
    found = load_report(report)
    sections: list[tuple[str, Report | SuiteSection]] = [(str(found.prompts.suite), found), *found.suites.items()]
    weeks: list[dict[str, Any]] = [
        {
            "week": name,
            "num_prompts": section.prompts.num_prompts,
            "tau": section.acceptance.tokens_per_target_step,
            "tau_ci": section.acceptance.tokens_per_target_step_ci,
        }
        for name, section in sections
    ]
    write_json(output / "drift.json", {"format_version": 1, "weeks": weeks, "too_few": too_few, "traffic": traffic.counts()})
    rows = [
        (each["week"], str(each["num_prompts"]), f"{number(each['tau'])} {interval(each['tau_ci'])}".rstrip()) for each in weeks
    ]
    few = ", ".join(f"{week} ({count})" for week, count in too_few.items())
    page = (
        "# Drift\n\nTokens per target step of the served draft on prompts of each week that it was not trained on.\n\n"
        + table(("week", "prompts", "tau [95 % interval]"), rows)
        + (f"\n\nNot measured, for too few prompts: {few}." if few else "")
        + "\n"
    )
    write_text(output / "drift.md", page)
    say(page)

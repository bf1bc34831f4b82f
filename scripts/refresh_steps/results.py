"""What a refresh, or a look at the drift, has found: JSON for programs, Markdown for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.files import read_object, write_json, write_text
from configs.runtime.terminal import say
from configs.schema.commands.refreshing import OLD, TRAFFIC
from eval.report.change import tau_change
from eval.report.markdown import table
from eval.report.schema import Report, load_report
from eval.report.text import interval, number

RESULTS, PAGE = "refresh.json", "refresh.md"
VERDICTS = {DONE: "pass", GATE_FAILED: "fail"}


def write_refresh(output: Path, new: Path, served: Path, counts: Sequence[Path], code: int) -> None:
    """Write `refresh.json` and `refresh.md`: tau of both drafts on both suites, compared prompt by prompt.

    Args:
        output: the folder.
        new, served: reports.
        counts: manifests of the traffic and of the mixed data.
        code: the gate's.
    """
    ours, theirs = load_report(new), load_report(served)
    changes: dict[str, Any] = {}
    for name, suite in ((TRAFFIC, None), (OLD, OLD)):
        change = tau_change(ours, theirs, suite)
        changes[name] = {"num_prompts": 0} if change is None else {"num_prompts": change.num_clusters, **asdict(change)}
    traffic, data = (read_object(path, "manifest") for path in counts)
    verdict = VERDICTS.get(code, "inconclusive")
    trained_on = data["counts"]["train"]["by_source"]
    write_json(
        output / RESULTS,
        {
            "format_version": 1,
            "verdict": verdict,
            "exit_code": code,
            "tokens_per_target_step": changes,
            "traffic": traffic,
            "trained_on": trained_on,
        },
    )
    rows = [
        (
            label,
            str(changes[name]["num_prompts"]),
            number(changes[name].get("theirs")),
            number(changes[name].get("ours")),
            f"{number(changes[name].get('ratio'), 3)} {interval(changes[name].get('ratio_ci'), 3)}",
        )
        for name, label in ((TRAFFIC, "held-out traffic"), (OLD, "old suite (forgetting)"))
    ]
    page = (
        f"# Refresh: {verdict}\n\nTokens per target step, both drafts on the same prompts. Trained on {trained_on['traffic']} "
        f"conversations of the traffic and {trained_on['replay']} of the old data.\n\n"
        + table(("prompts", "number", "served", "refreshed", "ratio [95 % interval]"), rows)
        + "\n"
    )
    write_text(output / PAGE, page)
    say(page)


def write_drift(output: Path, report: Path, left_out: dict[str, int], counts: dict[str, Any]) -> None:
    """Write `drift.json` and `drift.md`: tau of the served draft by week.

    Args:
        output: the folder.
        report: of an evaluation whose suites are the weeks.
        left_out: prompts of weeks with too few of them.
        counts: of the log.
    """
    found = load_report(report)
    weeks = [_week(str(name), section) for name, section in [(found.prompts.suite, found), *found.suites.items()]]
    write_json(output / "drift.json", {"format_version": 1, "weeks": weeks, "too_few": left_out, "traffic": counts})
    rows = [
        (each["week"], str(each["num_prompts"]), f"{number(each['tau'])} {interval(each['tau_ci'])}".rstrip()) for each in weeks
    ]
    few = ", ".join(f"{week} ({count})" for week, count in left_out.items())
    page = (
        "# Drift\n\nTokens per target step of the served draft on prompts of each week that it was not trained on.\n\n"
        + table(("week", "prompts", "tau [95 % interval]"), rows)
        + (f"\n\nNot measured, for too few prompts: {few}." if few else "")
        + "\n"
    )
    write_text(output / "drift.md", page)
    say(page)


def _week(name: str, section: Report | Any) -> dict[str, Any]:
    acceptance = section.acceptance
    return {
        "week": name,
        "num_prompts": section.prompts.num_prompts,
        "tau": acceptance.tokens_per_target_step,
        "tau_ci": acceptance.tokens_per_target_step_ci,
    }

"""What a refresh has found: JSON for programs, Markdown for people."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.files import read_object, write_json, write_text
from configs.runtime.terminal import say
from configs.schema.commands.refreshing import OLD, TRAFFIC
from eval.report.change import tau_change
from eval.report.markdown import table
from eval.report.schema import load_report
from eval.report.text import interval, number

RESULTS, PAGE = "refresh.json", "refresh.md"
VERDICTS = {DONE: "pass", GATE_FAILED: "fail"}
LABELS = {TRAFFIC: "held-out traffic", OLD: "old suite (forgetting)"}


def write_refresh(output: Path, new: Path, served: Path, traffic: Path, mixed: Path, code: int) -> None:
    """Write `refresh.json` and `refresh.md`: tau of both drafts on both suites, compared prompt by prompt.

    Args:
        output: the folder.
        new, served: reports.
        traffic, mixed: manifests of the cleaned log and of the mixed data.
        code: the gate's.
    """
    ours, theirs = load_report(new), load_report(served)
    changes: dict[str, dict[str, Any]] = {}
    for name, suite in ((TRAFFIC, None), (OLD, OLD)):
        change = tau_change(ours, theirs, suite)
        changes[name] = {"num_prompts": 0} if change is None else {"num_prompts": change.num_clusters, **asdict(change)}
    verdict = VERDICTS.get(code, "inconclusive")
    trained_on = read_object(mixed, "manifest")["counts"]["train"]["by_source"]
    write_json(
        output / RESULTS,
        {
            "format_version": 1,
            "verdict": verdict,
            "exit_code": code,
            "tokens_per_target_step": changes,
            "traffic": read_object(traffic, "manifest"),
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
        for name, label in LABELS.items()
    ]
    page = (
        f"# Refresh: {verdict}\n\nTokens per target step, both drafts on the same prompts. Trained on {trained_on['traffic']} "
        f"conversations of the traffic and {trained_on['replay']} of the old data.\n\n"
        + table(("prompts", "number", "served", "refreshed", "ratio [95 % interval]"), rows)
        + "\n"
    )
    write_text(output / PAGE, page)
    say(page)

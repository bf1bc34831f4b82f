"""A head trained on every turn of chats against one trained on their last turns: `python -m scripts.bench.turns`.

Both have the same recipe, the same chats and as many steps; one has labels on all answers, the other on each chat's last.
Both are decoded on held-out chats, a suite for each turn.
"""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.runtime.command import DONE, run_command
from configs.runtime.loading import load_config
from configs.schema.base import PositiveInt, Settings
from configs.schema.training import HeadsConfig
from distill.dataset.batches import ConversationDataset
from distill.dataset.conversations import MANIFEST, open_conversations
from eval.report.comparison import tau_change
from eval.report.schema import Report
from scripts.bench.harness import evaluate, run_config, write_results
from scripts.bench.heads import Run, rows_of


class TurnsBenchConfig(Settings):
    """`python -m scripts.bench.turns`: what learning every turn of a chat is worth, by turn."""

    prompts: str  # a file of chats, or of lists of user turns, which the target answers
    recipe: str = "configs/heads/eagle3.yaml"  # of `train/heads.py`, for target and head
    runs: str = "runs/turns/bench"  # folder: what was trained and measured, kept for the next time
    num_chats: PositiveInt = 300
    num_turns: PositiveInt = 3
    max_new_tokens: PositiveInt = 64
    output: str = "docs/results/turns.json"


def compare_turns(config: TurnsBenchConfig) -> int:
    data, recipe = Path(config.runs) / "all", load_config(HeadsConfig, config.recipe)
    if not (data / MANIFEST).is_file():
        asked = {"source": "file", "path": config.prompts, "num_prompts": config.num_chats, "on_too_long": "skip"}
        answers = {"max_new_tokens": config.max_new_tokens}
        run_config(
            "scripts.data", data, {"target": recipe.target.model_dump(mode="json"), "prompts": asked, "answers": answers}
        )
    folders = {"all_turns": data, "last_turns": write_last_turns(data, Path(config.runs) / "last")}
    suites = write_suites(config, data / "held_out.jsonl", choosing=recipe.held_out.num_prompts)
    rows: list[dict[str, Any]] = []
    reports: dict[str, Report] = {}
    schedule = recipe.schedule
    step_rows = schedule.batch_size * schedule.gradient_accumulation_steps
    num_steps = schedule.epochs * math.ceil(len(open_conversations(data / "train.jsonl")) / step_rows)
    for name, folder in folders.items():
        files = {"train": str(folder / "train.jsonl"), "held_out": str(folder / "held_out.jsonl"), "cache": None}
        changes = {
            "data": recipe.data.model_copy(update=files),
            "schedule": schedule.model_copy(update={"max_steps": schedule.max_steps or num_steps}),
            "output": str(Path(config.runs) / name),
        }
        own = recipe.model_copy(update=changes)
        run = Run(name, own, ConversationDataset(open_conversations(folder / "train.jsonl"), int(own.data.max_length)))
        if not (run.folder / "outcome.json").is_file():
            run_config("train.heads", run.folder, own.model_dump(mode="json"))
        report = evaluate(run.folder.with_name(f"{name}-eval"), evaluation_of(config, run, suites))
        reports[name] = Report.model_validate(report)
        rows += rows_of(run, report)
    ratios: dict[str, Any] = {}
    for number, suite in enumerate(suites, 1):
        change = tau_change(reports["all_turns"], reports["last_turns"], None if number == 1 else suite["name"])
        ratios[f"all_vs_last_turns_tau_turn_{number}"] = None if change is None else change.ratio
    write_results(config.output, "turns", rows=rows, ratios=ratios, config=config)
    return DONE


def write_last_turns(data: Path, folder: Path) -> Path:
    """Write the last row of each chat of a data set, with labels on the last answer alone."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = open_conversations(data / "train.jsonl")
    last = {row.prompt_id: row for row in rows}
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(replace(row, earlier=()).to_line() for row in last.values())
    for name in ("held_out.jsonl", MANIFEST):
        shutil.copy(data / name, folder / name)
    return folder


def write_suites(config: TurnsBenchConfig, held_out: Path, *, choosing: int) -> list[dict[str, Any]]:
    """Write a suite for each turn of held-out chats, none of which chose a checkpoint: the first `choosing` rows did."""
    rows, suites = open_conversations(held_out), []
    chose = {row.prompt_id for row in rows[:choosing]}
    for turn in range(config.num_turns):
        path = Path(config.runs) / f"turn_{turn + 1}.jsonl"
        path.write_text("".join(row.to_line() for row in rows if row.turn == turn and row.prompt_id not in chose), "utf-8")
        suites.append({"name": path.stem, "path": str(path)})
    return suites


def evaluation_of(config: TurnsBenchConfig, run: Run, suites: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "target": run.config.target.model_dump(mode="json"),
        "draft": str(run.folder / "artifact"),
        "suites": suites,
        "decode": {"max_new_tokens": config.max_new_tokens, "num_speculative_tokens": run.config.num_speculative_tokens},
        "repeats": 1,
    }


if __name__ == "__main__":
    sys.exit(run_command(TurnsBenchConfig, compare_turns, description=__doc__))

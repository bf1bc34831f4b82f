"""Two checkouts beside each other: the losses of training steps, the tokens of answers, and the speed of both.

    git worktree add ../before REVISION && make -C ../before setup
    python scripts/benchmark.py commits --set base=../before

For a change that is to change no figure. Each turn runs the training entries and the evaluation of both checkouts as commands,
one after the other, on this checkout's target and data (after `make demo`).
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.files import CHECKOUT, read_jsonl
from configs.schema.commands.benchmarks import CommitsConfig
from eval.stats.bootstrap import Interval, ratio_interval
from scripts.bench.harness import SEED, flat, take_turns, write_results

log = logging.getLogger("draftsmith")

MODES = ("autoregressive", "speculative")


def compare_commits(config: CommitsConfig) -> int:
    """Run both checkouts in turns, write the results file, and return 1 where losses or tokens differ."""
    base = Path(config.base).resolve()
    if not (base / "train" / "heads.py").is_file():
        raise InputError(f"base: {base} is no checkout of draftsmith; make one with `git worktree add DIR REVISION`")
    runs = Path(config.runs).resolve()
    sides = {
        name: partial(_run_stage, checkout=folder, output=runs / name, config=config)
        for name, folder in (("here", CHECKOUT), ("base", base))
    }
    stages = ["distill", "heads", "eval"]
    turns = take_turns(sides, stages, config.repeats, description="Two checkouts", unit="stages", warm_up=False)
    results = {name: [[turn.result for turn in repeats] for repeats in cases] for name, cases in turns.items()}
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Interval] = {}
    for number, stage in enumerate(stages):
        here, there = results["here"][number], results["base"][number]
        rows.append({"stage": stage, "values": len(there[0]["values"]), "equal": count_equal(here, there)})
        for what in there[0]["seconds"]:
            ours, theirs = ([second for run in side for second in run["seconds"][what]] for side in (here, there))
            ratios[f"{what}_speed_vs_base"] = ratio_interval(theirs, ours, samples=config.interval_samples, seed=SEED)
    write_results(config.output, "commits", config, rows=rows, ratios=ratios)
    log.info("%s: %s; %s", config.output, rows, flat(ratios))
    return 0 if all(row["equal"] == row["values"] for row in rows) else 1


def count_equal(here: Sequence[Mapping[str, Any]], there: Sequence[Mapping[str, Any]]) -> int:
    """Return how many of the base's values, of its first repeat, all repeats of both sides have at the same place."""
    runs = [run["values"] for run in (*here, *there)]
    return sum(all(len(run) > place and run[place] == value for run in runs) for place, value in enumerate(there[0]["values"]))


def read_training(folder: Path) -> dict[str, Any]:
    """Return a training run's losses and gradient norms by step, and the seconds of each step but the first."""
    steps = [row for _, row in read_jsonl(folder / "metrics.jsonl", "metrics") if "loss" in row]
    return {
        "values": [(row["step"], row["loss"], row["gradient_norm"]) for row in steps],
        "seconds": {folder.name: [row["seconds"] for row in steps[1:]]},
    }


def read_evaluation(folder: Path) -> dict[str, Any]:
    """Return an evaluation's answers as token ids, and the seconds of plain and of speculative decoding."""
    lines = [line for _, line in read_jsonl(folder / "records.jsonl", "records")]
    answers, timings = ([line[kind] for line in lines if kind in line] for kind in ("generation", "timing"))
    return {
        "values": [(each["prompt_id"], each["mode"], each["tokens"]) for each in answers if each["mode"] in MODES],
        "seconds": {mode: [each["decode_seconds"] for each in timings if each["mode"] == mode] for mode in MODES},
    }


def _run_stage(stage: str, repeat: int, *, checkout: Path, output: Path, config: CommitsConfig) -> dict[str, Any]:
    folder = output / str(repeat) / stage
    if stage == "eval":
        command = ["eval/run.py", "--config", config.eval_config, "--set", f"draft={config.draft}"]
        command += ["--set", f"suite.num_prompts={config.num_prompts}", "--set", "cost=null", "--set", "baselines=[]"]
    else:
        command = [f"train/{stage}.py", "--config", getattr(config, f"{stage}_config")]
        settings = {"max_steps": config.steps, "log_every_steps": 1, "eval_every_steps": config.steps, "resume": "false"}
        command += [word for key, value in settings.items() for word in ("--set", f"schedule.{key}={value}")]
    _run(checkout, [*command, "--set", f"output={folder}"])
    return read_evaluation(folder) if stage == "eval" else read_training(folder)


def _run(checkout: Path, command: Sequence[str]) -> None:
    """Run a command of a checkout here, with its own environment if it has one."""
    python = checkout / ".venv" / "bin" / "python"
    words = [str(python) if python.is_file() else sys.executable, str(checkout / command[0]), *command[1:]]
    variables = {**os.environ, "PYTHONPATH": str(checkout), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"{command[0]} of {checkout} ended with code {done.returncode}: {done.stderr.strip()[-500:]}")

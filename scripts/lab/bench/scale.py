"""The scale benchmark: several processes beside one, padding, checkpoints, waiting for data, the plan's seconds."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from configs.runtime.command import BAD_INPUT, DONE
from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import CHECKOUT, read_json, write_json
from configs.runtime.loading import load_config
from configs.schema.commands.planning import PlanConfig, PlanHeadsConfig
from configs.schema.training import HeadsConfig
from distill.dataset.batches import BucketedBatchSampler, ConversationDataset
from distill.dataset.conversations import read_conversations
from distill.dataset.packing import PackedBatchSampler
from eval.stats.bootstrap import Interval, paired_ratio_interval, ratio_interval
from scripts.lab.bench.engines import SPLITS, compare_engines, hold_shares
from scripts.lab.bench.harness import write_results
from scripts.lab.bench.turns import take_turns
from scripts.lab.measuring import SEED
from scripts.lab.settings import BenchScaleConfig, EngineComparisonSettings
from scripts.lab.trained_runs import OUTCOME
from train.plan.plan import make_plan
from train.telemetry.records import METRICS_FILE, read_lines

log = logging.getLogger("draftsmith")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run: tokens a second and waiting for data in its timed half, seconds of a step and of a checkpoint in all of it."""

    tokens_per_second: float
    step_seconds: float
    input_share: float
    checkpoint_seconds: float


def compare_scale(config: BenchScaleConfig) -> int:
    recipe = load_config(HeadsConfig, config.recipe)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"cache": config.cache})})
    share, left_over = divmod(recipe.schedule.batch_size, config.num_processes)
    if left_over:
        raise ConfigError(f"num_processes: {config.num_processes} do not divide schedule.batch_size of {config.recipe}")
    shared = recipe.model_copy(update={"schedule": recipe.schedule.model_copy(update={"batch_size": share})})
    with TemporaryDirectory(prefix="bench-scale-") as scratch:
        sides = {
            "alone": partial(measure, config, recipe, 1, Path(scratch) / "alone"),
            "each its own": partial(measure, config, recipe, config.num_processes, Path(scratch) / "each"),
            "shared": partial(measure, config, shared, config.num_processes, Path(scratch) / "shared"),
        }
        turns = take_turns(sides, range(config.repeats), 1, description="training runs", unit="repeats", warm_up=False)
    alone, each_its_own, together = ([turn.result for (turn,) in turns[name]] for name in sides)
    settings = EngineComparisonSettings()
    held = {name: hold_shares(settings, *how) for name, how in SPLITS.items()} if config.engines else {}
    samples, ones = config.bootstrap_samples, [1.0] * len(alone)
    name = "two_processes_vs_one" if config.num_processes == 2 else "processes_vs_one"
    checkpoints = [run.checkpoint_seconds for run in alone]
    between = [run.checkpoint_seconds + config.checkpoint_every_steps * run.step_seconds for run in alone]
    plan = make_plan(PlanHeadsConfig.model_validate(recipe.model_dump(mode="json")))
    write_results(
        config.output,
        "scale",
        config,
        rows=compare_engines(settings) if config.engines else [],
        ratios={
            name: tokens_a_second(each_its_own, alone, samples),
            f"{name}_same_global_batch": tokens_a_second(together, alone, samples),
            **tokens_among_positions(plan.config),
            "checkpoint_share": ratio_interval(checkpoints, between, samples=samples, seed=SEED),
            "input_share": ratio_interval([run.input_share for run in alone], ones, samples=samples, seed=SEED),
            "step_seconds_vs_plan": sum(run.step_seconds for run in alone) / len(alone) / plan.times.total,
            **{each: row["held_bytes"] / row["whole_bytes"] for each, row in held.items()},
        },
        split_target=list(held.values()),
        runs=[asdict(run) for run in (*alone, *each_its_own, *together)],
    )
    return DONE


def measure(
    config: BenchScaleConfig, recipe: HeadsConfig, num_processes: int, parent: Path, number: int, repeat: int
) -> Measured:
    """Train in processes of one thread each; return what the run's own records say of its second half."""
    folder = parent / str(number)
    schedule = {"max_steps": 2 * config.steps, "log_every_steps": config.steps, "trackers": [], "resume": False}
    schedule |= {"checkpoint_every_steps": config.steps}
    values = recipe.model_dump(mode="json") | {"output": str(folder)}
    values["schedule"] |= schedule
    values["held_out"] |= {"num_prompts": 1}
    values["sanity"] |= {"enabled": False}
    write_json(folder / "recipe.yaml", values)  # JSON is YAML
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    command = [sys.executable, *(launcher if num_processes > 1 else []), str(CHECKOUT / "train" / "heads.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command += ["--config", str(folder / "recipe.yaml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "nothing")
        failed = InputError if done.returncode == BAD_INPUT or said.startswith("error: ") else RuntimeError
        raise failed(f"a run of {num_processes} processes ended with code {done.returncode}: {said}")
    _, timed = (row for row in read_lines(folder / METRICS_FILE) if "tokens_per_second" in row)
    outcome = read_json(folder / OUTCOME, "outcome of a training")
    return Measured(
        tokens_per_second=timed["tokens_per_second"],
        step_seconds=outcome["training_seconds"] / (2 * config.steps),
        input_share=timed["time_share_data"],
        checkpoint_seconds=outcome["checkpoint_seconds"] / 2,
    )


def tokens_among_positions(recipe: PlanConfig) -> dict[str, float]:
    """Return the share of a batch's positions that hold tokens over an epoch of the recipe's data, packed and bucketed."""
    dataset = ConversationDataset(read_conversations(Path(recipe.data.train)), recipe.data.max_length)
    batch_size, seed = recipe.schedule.batch_size, recipe.schedule.seed
    packed = recipe.data.model_copy(update={"packing": True})
    rows = PackedBatchSampler(dataset.lengths, batch_size, pack_length=packed.row_length or packed.max_length, seed=seed)
    buckets = BucketedBatchSampler(dataset.lengths, batch_size, seed=seed)
    return {
        "packing_efficiency": efficiency(rows, dataset.lengths),
        "bucketing_efficiency": efficiency(buckets, dataset.lengths),
    }


def efficiency(batches: Iterable[Sequence[int | tuple[int, ...]]], lengths: np.ndarray) -> float:
    """Return the tokens among all positions of batches, whose rows are conversations or several of them."""
    sizes = [[int(lengths[np.atleast_1d(row)].sum()) for row in batch] for batch in batches]
    return sum(map(sum, sizes)) / sum(len(batch) * max(batch) for batch in sizes)


def tokens_a_second(runs: Sequence[Measured], others: Sequence[Measured], samples: int) -> Interval:
    """Return how many tokens a second the runs had on average, over the others'; what is drawn is the run."""
    ours, theirs = ([run.tokens_per_second for run in side] for side in (runs, others))
    ones = [1.0] * len(ours)
    return paired_ratio_interval(ours, ones, theirs, ones, samples=samples, seed=SEED)

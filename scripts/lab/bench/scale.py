"""The scale benchmark: several processes of one thread beside one, padding, checkpoints, waiting for data, plan beside run.

Each run is a process group of its own (`bench.scale_steps`), because a process cannot leave one; the sides take
turns, every second time in reverse. All runs see the same conversations in batches of the same size over all processes. Needs
the recipe, data and cache of `make bench-heads`, two cores that nothing else uses, and Linux, as memory is read from
/proc. Fifteen runs of half a minute by default.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from configs.runtime.command import BAD_INPUT, DONE
from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import read_json, write_json
from configs.runtime.loading import load_config
from configs.schema.commands.planning import PlanHeadsConfig
from configs.schema.training import HeadsConfig
from distill.dataset.batches import BucketedBatchSampler, ConversationDataset
from distill.dataset.conversations import read_conversations
from distill.dataset.packing import PackedBatchSampler
from eval.stats.bootstrap import Interval, ratio_interval
from scripts.advice.measuring import SEED
from scripts.lab.bench.engines import SPLITS, compare_engines, hold_shares
from scripts.lab.bench.harness import write_results
from scripts.lab.bench.scale_steps import Steps
from scripts.lab.bench.turns import Turn, speed_ratio, take_turns
from scripts.lab.settings import BenchScaleConfig, EngineComparisonSettings, ScaleStepsConfig
from train.plan.plan import make_plan

log = logging.getLogger("draftsmith")

CHILD = Path(__file__).with_name("scale_steps.py")


def compare_scale(config: BenchScaleConfig) -> int:
    """Run the benchmark and write its file; return the exit code."""
    recipe = with_cache(config)
    check_shares(recipe, config.num_processes)
    with TemporaryDirectory(prefix="bench-scale-") as scratch:
        alone, each_its_own, shared = run_in_turns(config, recipe, Path(scratch))
        watched = run_steps(recipe, config, 1, Path(scratch) / "watched", watch_memory=True)
    settings = EngineComparisonSettings()
    held = {name: hold_shares(settings, *how) for name, how in SPLITS.items()} if config.engines else {}
    samples = config.bootstrap_samples
    name = "two_processes_vs_one" if config.num_processes == 2 else "processes_vs_one"
    write_results(
        config.output,
        "scale",
        config,
        rows=compare_engines(settings) if config.engines else [],
        ratios={
            name: tokens_a_second(each_its_own, alone, samples),
            f"{name}_same_global_batch": tokens_a_second(shared, alone, samples),
            **tokens_among_positions(recipe),
            "checkpoint_share": checkpoint_share(alone, config.checkpoint_every_steps, samples),
            "input_share": input_share(alone, samples),
            **{each: row["held_bytes"] / row["whole_bytes"] for each, row in held.items()},
        },
        split_target=list(held.values()),
        runs=[asdict(run) for run in (*alone, *each_its_own, *shared)],
        plan=plan_beside_run(recipe, watched),
    )
    return DONE


def with_cache(config: BenchScaleConfig) -> HeadsConfig:
    """Return the recipe, on the cache that the benchmark names, without trackers."""
    recipe = load_config(HeadsConfig, config.recipe)
    data = recipe.data.model_copy(update={"cache": config.cache})
    schedule = recipe.schedule.model_copy(update={"trackers": []})
    return recipe.model_copy(update={"data": data, "schedule": schedule})


def check_shares(recipe: HeadsConfig, num_processes: int) -> None:
    """Refuse a batch that the processes cannot share evenly, and steps of several micro-batches, which are not timed here."""
    if recipe.schedule.gradient_accumulation_steps > 1:
        raise ConfigError(
            "recipe: schedule.gradient_accumulation_steps must be 1 here, where every micro-batch is a step, got "
            f"{recipe.schedule.gradient_accumulation_steps}"
        )
    if recipe.schedule.batch_size % num_processes:
        raise ConfigError(
            f"num_processes: {num_processes} processes cannot share batches of {recipe.schedule.batch_size} evenly; give a "
            "divisor, or another recipe"
        )


def run_in_turns(config: BenchScaleConfig, recipe: HeadsConfig, scratch: Path) -> tuple[list[Steps], ...]:
    """Run each side `config.repeats` times.

    Returns:
        The runs of one process; of several, each with batches of the recipe's size; and of several that share such batches.
    """
    share = recipe.schedule.model_copy(update={"batch_size": recipe.schedule.batch_size // config.num_processes})
    shared = recipe.model_copy(update={"schedule": share})

    def side(name: str, taken: HeadsConfig, num_processes: int, number: int, repeat: int) -> Steps:
        run = run_steps(taken, config, num_processes, scratch / f"{name}-{number}")
        log.info(
            "repeat %d, %d processes with batches of %d each: %.0f tokens/s",
            *(number + 1, num_processes, taken.schedule.batch_size, run.tokens / run.seconds),
        )
        return run

    sides = {
        "alone": partial(side, "alone", recipe, 1),
        "each": partial(side, "each", recipe, config.num_processes),
        "shared": partial(side, "shared", shared, config.num_processes),
    }
    turns = take_turns(sides, range(config.repeats), 1, description="training runs", unit="repeats", warm_up=False)
    return tuple([turn.result for (turn,) in turns[name]] for name in sides)


def run_steps(
    recipe: HeadsConfig, config: BenchScaleConfig, num_processes: int, folder: Path, *, watch_memory: bool = False
) -> Steps:
    """Take a recipe's steps in processes of their own, of one thread each."""
    child = ScaleStepsConfig(
        recipe=recipe.model_copy(update={"output": str(folder / "run")}),
        steps=config.steps,
        warmup_steps=config.warmup_steps,
        checkpoints=0 if watch_memory else config.checkpoints,
        watch_memory=watch_memory,
        result=str(folder / "steps.json"),
    )
    write_json(folder / "config.yaml", child.model_dump(mode="json"))  # JSON is YAML
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    command = [sys.executable, *(launcher if num_processes > 1 else []), str(CHILD), "--config", str(folder / "config.yaml")]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "nothing")
        failed = InputError if done.returncode == BAD_INPUT or said.startswith("error: ") else RuntimeError
        raise failed(f"a run of {num_processes} processes ended with code {done.returncode}: {said}")
    return Steps(**read_json(folder / "steps.json", "timed steps"))


def tokens_among_positions(recipe: HeadsConfig) -> dict[str, float]:
    """Return the share of a batch's positions that hold tokens over an epoch of the recipe's data, packed and bucketed."""
    dataset = ConversationDataset(read_conversations(Path(recipe.data.train)), recipe.data.max_length)
    batch_size, seed = recipe.schedule.batch_size, recipe.schedule.seed
    packed = recipe.data.model_copy(update={"packing": True})
    rows = PackedBatchSampler(dataset.lengths, batch_size, pack_length=packed.row_length or packed.max_length, seed=seed)
    buckets = BucketedBatchSampler(dataset.lengths, batch_size, seed=seed)
    return {
        "packing_efficiency": rows.measure().packing_efficiency,
        "bucketing_efficiency": buckets.measure().packing_efficiency,
    }


def checkpoint_share(runs: Sequence[Steps], every_steps: int, samples: int) -> Interval:
    """Return the share of a run's time that goes into checkpoints, one every so many steps; what is drawn is the run."""
    spent = [run.checkpoint_seconds for run in runs]
    whole = [run.checkpoint_seconds + every_steps * run.seconds / run.steps for run in runs]
    return ratio_interval(spent, whole, samples=samples, seed=SEED)


def input_share(runs: Sequence[Steps], samples: int) -> Interval:
    """Return the share of the steps' time that was spent waiting for batches; what is drawn is the run."""
    return ratio_interval([run.input_seconds for run in runs], [run.seconds for run in runs], samples=samples, seed=SEED)


def plan_beside_run(recipe: HeadsConfig, run: Steps) -> dict[str, float]:
    """Return what `scripts/plan.py` says of one process of one thread, and what was measured.

    The plan's memory is without the keys and values of held-out decoding, which these steps have none of.
    """
    plan = make_plan(PlanHeadsConfig.model_validate(recipe.model_dump(mode="json")))
    planned = sum(asdict(plan.memory).values()) - plan.memory.held_out_kv
    measured = run.peak_bytes - run.baseline_bytes
    seconds = run.seconds / run.steps
    return {
        "planned_bytes": planned,
        "measured_bytes": measured,
        "measured_over_planned_bytes": measured / planned,
        "planned_step_seconds": plan.times.total,
        "measured_step_seconds": seconds,
        "measured_over_planned_seconds": seconds / plan.times.total,
    }


def tokens_a_second(runs: Sequence[Steps], others: Sequence[Steps], samples: int) -> Interval:
    """Return how many tokens a second the runs had, over the others'; what is drawn is the run."""
    ours, theirs = ([[Turn(run, run.seconds)] for run in side] for side in (runs, others))
    return speed_ratio(ours, theirs, lambda run: run.tokens, samples=samples)

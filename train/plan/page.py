"""A plan as text: what `draftsmith plan` prints."""

from __future__ import annotations

import math
from dataclasses import asdict

from configs.schema.commands.planning import HardwareConfig, PlanConfig, PlanHeadsConfig
from eval.report.tables import table
from train.plan.memory import GIBIBYTE, Sharing
from train.plan.models import count, frozen_copies
from train.plan.plan import Plan, make_plan

NODE = "scripts/cluster/node.sh"


def plan_page(config: PlanConfig, options: str) -> str:
    """Return the plan of a recipe as text and tables; `options` give training the recipe, in the line that starts it."""
    plan = make_plan(config)
    parts = asdict(plan.memory)
    memory = [(name.replace("_", " "), _bytes(value)) for name, value in parts.items()]
    memory.append(("sum, nothing split", _bytes(sum(parts.values()))))
    flops = [(name.replace("_", " "), f"{value / 1e6:,.1f} MFLOP") for name, value in asdict(plan.flops).items()]
    flops.append(("all", f"{plan.flops.total / 1e6:,.1f} MFLOP"))
    return "\n\n".join(
        [
            _models(plan),
            table(("memory of one process", "bytes"), memory, numbers=False),
            _engines(plan),
            table(("part", "a token of the batch"), flops, numbers=False),
            _time(plan),
            _start(plan, options),
        ]
    )


def launch_line(engine: Sharing, hardware: HardwareConfig, command: str) -> str:
    """Return the line that starts a run, an entry with its options: on one node, or as a SLURM job over several."""
    n, per_node = hardware.num_accelerators, hardware.accelerators_per_node
    if engine.group > 1:
        command += f" --set target.shards={engine.group}"
    recipe = f"RECIPE=configs/accelerate/{engine.recipe}.yaml " if engine.stage else ""
    if n > per_node:
        nodes = math.ceil(n / per_node)
        return f"{recipe}sbatch --nodes={nodes} --gpus-per-node={per_node} scripts/cluster/slurm.sbatch {command}"
    if engine.spreads_target:
        file = f"configs/accelerate/{engine.recipe}.yaml"
        return f"accelerate launch --quiet --config_file {file} {command} --set target.device_map=auto"
    on_cpu = hardware.preset == "laptop_cpu"
    if engine.max_processes == 1:
        name = engine.on_cpu if on_cpu else engine.recipe
        return f"accelerate launch --quiet --config_file configs/accelerate/{name}.yaml {command}"
    return f"{recipe}{'ACCELERATE_USE_CPU=true ' if on_cpu else ''}PROCESSES_PER_NODE={n} {NODE} {command}"


def _models(plan: Plan) -> str:
    config, draft = plan.config, plan.models.draft
    return (
        f"target {config.target.name}: {count(plan.models.target):,} parameters in {config.target.dtype}\n"
        f"draft: {count(draft, trained=True):,} parameters trained, {frozen_copies(draft):,} frozen beside them\n"
        f"data: {plan.work.num_conversations:,} conversations of {plan.work.mean_tokens:.0f} tokens on average, "
        f"{100 * plan.work.label_share:.0f} % of them labels; rows up to {config.data.max_length}"
    )


def _engines(plan: Plan) -> str:
    rows = [
        (
            _name(plan, fit.engine),
            f"{fit.num_bytes / GIBIBYTE:.2f} GiB",
            "fits" if fit.complaint is None else f"no: {fit.complaint}",
        )
        for fit in plan.fits
    ]
    chosen = plan.fitting
    verdict = "none fits" if chosen is None else f"take {_name(plan, chosen.engine)}"
    machine = f"{plan.config.hardware.num_accelerators} x {plan.config.hardware.preset}"
    return table(("configs/accelerate", "each accelerator", machine), rows, numbers=False) + f"\n\nrecipe: {verdict}"


def _name(plan: Plan, engine: Sharing) -> str:
    """Return the recipe's name for this kind of machine."""
    on_cpu = plan.config.hardware.preset == "laptop_cpu" and engine.group == 1
    return (on_cpu and engine.on_cpu) or engine.name


def _start(plan: Plan, options: str) -> str:
    if plan.fitting is None:
        return "nothing fits: take larger accelerators, or shorter rows (data.max_length)"
    entry = "train/heads.py" if isinstance(plan.config, PlanHeadsConfig) else "train/distill.py"
    return f"start it by\n\n    {launch_line(plan.fitting.engine, plan.config.hardware, f'{entry} {options}')}"


def _time(plan: Plan) -> str:
    hardware, times = plan.config.hardware, plan.times
    tokens = plan.tokens_per_step * plan.num_processes
    epochs = plan.steps * tokens / (plan.work.num_conversations * plan.work.mean_tokens)
    pace = float(f"{plan.tokens_per_second:.3g}")
    made = "reads" if plan.config.data.cache is not None else "could read"
    return (
        f"disk: {_bytes(plan.checkpoint_bytes)} a checkpoint; the target cache that the recipe {made} takes "
        f"{_bytes(plan.cache_row_bytes * plan.cache_rows)} ({plan.cache_row_bytes} bytes a row, {plan.cache_rows:,} rows)\n"
        f"step: {times.total:.3g} s for {tokens:,.0f} tokens at "
        f"{100 * hardware.utilisation:.0f} % of {hardware.machine.tflops:g} TFLOP/s "
        f"(products {times.products:.3g} s, optimizer {times.optimizer:.3g} s, cache {times.cache:.3g} s; no communication)\n"
        f"pace: {pace:,.0f} tokens/s; {plan.steps:,} steps, {epochs:.2g} epochs: {plan.hours:.3g} hours "
        "of training steps"
    )


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value / 1e3:.4g} kB"

"""A plan as text: what `draftsmith plan` prints."""

from __future__ import annotations

import math

from configs.schema.commands.planning import HardwareConfig, PlanConfig, PlanHeadsConfig
from eval.report.tables import table
from train.plan.models import count, frozen_copies
from train.plan.plan import GIBIBYTE, Plan, Sharing, make_plan

NODE = "scripts/cluster/node.sh"


def plan_page(config: PlanConfig, options: str) -> str:
    """Return the plan of a recipe as text and tables; `options` give training the recipe, in the line that starts it."""
    plan = make_plan(config)
    memory = [*plan.memory.items(), ("sum, nothing split", sum(plan.memory.values()))]
    sizes = table(("memory of one process", "bytes"), [(name, _bytes(value)) for name, value in memory], numbers=False)
    return "\n\n".join([_models(plan), sizes, _engines(plan), _disk(plan), _start(plan, options)])


def launch_line(engine: Sharing, hardware: HardwareConfig, command: str) -> str:
    """Return the line that starts a run, an entry with its options: on one node, or as a SLURM job over several."""
    n, per_node = hardware.num_accelerators, hardware.accelerators_per_node
    if engine.group > 1:
        command += f" --set target.shards={engine.group}"
    if engine.spreads_target:
        command += " --set target.device_map=auto"
    if engine.alone:
        name = (hardware.on_cpu and engine.on_cpu) or engine.recipe
        return f"accelerate launch --quiet --config_file configs/accelerate/{name}.yaml {command}"
    recipe = f"RECIPE=configs/accelerate/{engine.recipe}.yaml " if engine.stage else ""
    if n > per_node:
        nodes = math.ceil(n / per_node)
        return f"{recipe}sbatch --nodes={nodes} --gpus-per-node={per_node} scripts/cluster/slurm.sbatch {command}"
    return f"{recipe}{'ACCELERATE_USE_CPU=true ' if hardware.on_cpu else ''}PROCESSES_PER_NODE={n} {NODE} {command}"


def _models(plan: Plan) -> str:
    config, draft = plan.config, plan.models.draft
    return (
        f"target {config.target.name}: {count(plan.models.target):,} parameters in {config.target.dtype}\n"
        f"draft: {count(draft, trained=True):,} parameters trained, {frozen_copies(draft):,} frozen beside them\n"
        f"data: {plan.work.num_conversations:,} conversations of {plan.work.mean_tokens:.0f} tokens on average, "
        f"{100 * plan.work.label_share:.0f} % of them labels; rows up to {config.data.max_length}"
    )


def _engines(plan: Plan) -> str:
    hardware = plan.config.hardware
    rows = [
        (
            _name(fit.engine, hardware),
            f"{fit.num_bytes / GIBIBYTE:.2f} GiB",
            "fits" if fit.complaint is None else f"no: {fit.complaint}",
        )
        for fit in plan.fits
    ]
    title = ("configs/accelerate", "each accelerator", f"{hardware.num_accelerators} x {hardware.preset}")
    chosen = "none fits" if plan.fitting is None else f"take {_name(plan.fitting.engine, hardware)}"
    return table(title, rows, numbers=False) + f"\n\nrecipe: {chosen}"


def _name(engine: Sharing, hardware: HardwareConfig) -> str:
    """Return the recipe's name for this kind of machine."""
    return (hardware.on_cpu and engine.group == 1 and engine.on_cpu) or engine.name


def _start(plan: Plan, options: str) -> str:
    if plan.fitting is None:
        return "nothing fits: take larger accelerators, or shorter rows (data.max_length)"
    entry = "train/heads.py" if isinstance(plan.config, PlanHeadsConfig) else "train/distill.py"
    return f"start it by\n\n    {launch_line(plan.fitting.engine, plan.config.hardware, f'{entry} {options}')}"


def _disk(plan: Plan) -> str:
    made = "reads" if plan.config.data.cache is not None else "could read"
    return (
        f"disk: {_bytes(plan.checkpoint_bytes)} a checkpoint; the target cache that the recipe {made} takes "
        f"{_bytes(plan.cache_row_bytes * plan.cache_rows)} ({plan.cache_row_bytes} bytes a row, {plan.cache_rows:,} rows)"
    )


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value / 1e3:.4g} kB"

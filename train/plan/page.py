"""A plan as Markdown: what `scripts/plan.py` prints, and the tables of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from configs.schema.commands.planning import PlanConfig, PlanHeadsConfig
from train.plan.launch_lines import launch_lines
from train.plan.memory import GIBIBYTE, Fit
from train.plan.models import count, frozen_copies
from train.plan.plan import Plan, make_plan
from train.plan.scaling import SIZES, Scaled

MEMORY_WORDS = {
    "target_weights": "target weights",
    "draft_weights": "draft weights that are trained, float32",
    "frozen_draft": "frozen part of the draft",
    "gradients": "gradients",
    "optimizer_states": "optimizer states (AdamW)",
    "draft_activations": "activations of the draft, longest rows",
    "target_activations": "states and activations of the target",
    "loss_logits": "logits of the chunked loss",
    "held_out_kv": "target's keys, values and states in held-out decoding",
}


def plan_page(config: PlanConfig, *, with_scaling: bool, options: str = "--config mine.yaml") -> str:
    """Return the plan of a recipe as text and tables.

    Args:
        options: by which training is given the recipe, for the launch lines.

    Raises:
        InputError: see `train.plan.plan.make_plan`.
    """
    plan = make_plan(config)
    parts = [_models(plan), _memory(plan), _engines(plan), _work(plan), _time(plan), ways_page(plan, options)]
    if with_scaling:
        parts.append("Scaling, on paper\n\n" + scaling_table(plan.scaled(SIZES)))
    return "\n\n".join(parts)


def ways_page(plan: Plan, options: str) -> str:
    """Return what each way that fits takes, and the fastest with the lines that start it."""
    fastest = plan.fastest
    if fastest is None:
        return "fastest: none fits"
    config, n = plan.config, plan.config.hardware.num_accelerators
    rows = [
        (
            _file(plan, way.fit),
            f"{way.fit.engine.trainers(n)} of {n}",
            f"{way.row.step_seconds_high:.3g} s",
            _rounded(way.row.tokens_per_second_low),
            f"{way.hours:.3g}",
        )
        for way in plan.ways
    ]
    entry = "train/heads.py" if isinstance(config, PlanHeadsConfig) else "train/distill.py"
    lines = launch_lines(fastest.fit.engine, config.hardware, entry, options)
    table = _table(("way that fits", "accelerators that train", "step", "tokens/s", "hours"), rows)
    return "\n".join(
        [
            table,
            "",
            f"fastest: {_file(plan, fastest.fit)}, {fastest.hours:.3g} hours; start it by",
            "",
            *(f"    {each}" for each in lines),
        ]
    )


def scaling_table(rows: Sequence[Scaled]) -> str:
    header = ("accelerators", "engine", "target", "sent by each", "sending", "step", "efficiency", "tokens/s")
    return _table(
        header,
        [
            (
                f"{row.num_accelerators:,}",
                row.engine,
                row.target,
                _bytes(row.sent_bytes),
                f"{1e3 * row.communication_seconds:.1f} ms",
                f"{1e3 * row.step_seconds_low:.1f} to {1e3 * row.step_seconds_high:.1f} ms",
                f"{100 * row.efficiency_low:.0f} to {100 * row.efficiency_high:.0f} %",
                f"{_rounded(row.tokens_per_second_low)} to {_rounded(row.tokens_per_second_high)}",
            )
            for row in rows
        ],
    )


def _models(plan: Plan) -> str:
    config, draft = plan.config, plan.models.draft
    return (
        f"target {config.target.name}: {count(plan.models.target):,} parameters in {config.target.dtype}\n"
        f"draft: {count(draft, trained=True):,} parameters trained, {frozen_copies(draft):,} frozen beside them\n"
        f"data: {plan.work.num_conversations:,} conversations of {plan.work.mean_tokens:.0f} tokens on average, "
        f"{100 * plan.work.label_share:.0f} % of them labels; rows up to {config.data.max_length}"
    )


def _memory(plan: Plan) -> str:
    rows = [(MEMORY_WORDS[name], _bytes(value)) for name, value in asdict(plan.memory).items()]
    rows.append(("sum, nothing split", _bytes(sum(asdict(plan.memory).values()))))
    return _table(("memory of one process", "bytes"), rows)


def _engines(plan: Plan) -> str:
    rows = [
        (_file(plan, fit), f"{fit.num_bytes / GIBIBYTE:.2f} GiB", "fits" if fit.complaint is None else f"no: {fit.complaint}")
        for fit in plan.fits
    ]
    chosen = plan.fitting
    verdict = "none fits" if chosen is None else f"take {_file(plan, chosen)}"
    machine = f"{plan.config.hardware.num_accelerators} x {plan.config.hardware.preset}"
    return _table(("configs/accelerate", "each accelerator", machine), rows) + f"\n\nrecipe: {verdict}"


def _file(plan: Plan, fit: Fit) -> str:
    """Return the recipe's name for this kind of machine."""
    on_cpu = plan.config.hardware.preset == "laptop_cpu" and fit.engine.on_cpu is not None and not fit.engine.servers
    return str(fit.engine.on_cpu) if on_cpu else fit.engine.name


def _work(plan: Plan) -> str:
    rows = [(name.replace("_", " "), f"{value / 1e6:,.1f} MFLOP") for name, value in asdict(plan.flops).items()]
    rows.append(("all", f"{plan.flops.total / 1e6:,.1f} MFLOP"))
    return _table(("part", "a token of the batch"), rows)


def _time(plan: Plan) -> str:
    hardware, times = plan.config.hardware, plan.times
    tokens = plan.tokens_per_second * plan.step_seconds
    epochs = plan.steps * tokens / plan.work.num_tokens
    made = "reads" if plan.config.data.cache is not None else "could read"
    return (
        f"target cache that the recipe {made}: {_bytes(plan.cache.num_bytes)} "
        f"({plan.cache.bytes_per_row} bytes a row, {plan.cache.rows:,} rows)\n"
        f"step: {plan.step_seconds:.3g} s for {tokens:,.0f} tokens at "
        f"{100 * hardware.utilisation:.0f} % of {hardware.machine.tflops:g} TFLOP/s "
        f"(products {times.products:.3g} s, optimizer {times.optimizer:.3g} s, cache {times.cache:.3g} s)\n"
        f"pace: {_rounded(plan.tokens_per_second)} tokens/s; {plan.steps:,} steps, {epochs:.2g} epochs: {plan.hours:.3g} hours "
        "of training steps"
    )


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value / 1e3:.4g} kB"


def _rounded(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

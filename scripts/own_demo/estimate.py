"""What the demo's steps will take on a model of one's own, printed before the first.

The training steps are planned by `train.plan`. Writing answers and evaluating are scaled from the demo's times on two cores
(docs/benchmarks.md) by the target's parameters and the number of prompts. No GPU was measured, so no times are given for one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from configs.runtime.loading import load_config
from configs.schema.commands.planning import PlanConfig, PlanDistillConfig, PlanHeadsConfig
from scripts.own_demo.steps import HELD_OUT, OwnLoop

GIB = 2**30
DEMO_PARAMETERS = 134.5e6
SECONDS_A_PROMPT = 159 / 520  # of the demo, for a prompt and its answer
EVALUATION_SECONDS = 130.0
ANSWER_TOKENS = 128
TRAINED_BYTES, FROZEN_BYTES = 16, 4  # of a draft's number on disk: in the artifact, and with its optimiser in a checkpoint


def plan_text(loop: OwnLoop, steps: Iterable[str]) -> str:
    """Return what the steps named will take, as text.

    Raises:
        InputError: the target's config makes no model that a draft can be made for.
    """
    from train.plan.models import count, frozen_copies
    from train.plan.plan import make_plan

    recipes: list[tuple[type[PlanConfig], str]] = [
        (PlanDistillConfig, "configs/distill/demo.yaml"),
        (PlanHeadsConfig, "configs/heads/demo.yaml"),
    ]
    distil, head = (make_plan(load_config(schema, path, _planned(loop, path))) for schema, path in recipes)
    size = count(distil.models.target)
    seconds = {
        "data": SECONDS_A_PROMPT * loop.num_prompts * size / DEMO_PARAMETERS,
        "distil": distil.hours * 3600,
        "head": head.hours * 3600,
        "evaluate": EVALUATION_SECONDS * size / DEMO_PARAMETERS,
    }
    lines = [f"the demo on {loop.target}: {size:,} parameters, {loop.num_prompts:,} prompts; output in {loop.run}", ""]
    total = 0.0
    for name in steps:
        spent = seconds.get(name.partition(":")[0], 0.0)
        total += spent
        lines.append(f"   {'not known' if loop.on_gpu else _minutes(spent):>12}  {name}")
    memory = max(sum(vars(plan.memory).values()) for plan in (distil, head))
    drafts = [plan.models.draft for plan in (distil, head)]
    disk = sum(TRAINED_BYTES * count(each, trained=True) + FROZEN_BYTES * frozen_copies(each) for each in drafts)
    lines += [
        f"   {'not known' if loop.on_gpu else _minutes(total):>12}  in all, but for loading; each step shows the time left",
        "",
        f"memory: about {memory / GIB + 1:.1f} GiB{' of the GPU' if loop.on_gpu else f' of {_memory_here()} here'}",
        f"disk: about {max(disk / 1e6, 1):,.0f} MB of drafts and checkpoints; a target from the Hub takes its own size besides",
    ]
    if loop.on_gpu:
        lines.append("no times are known for a GPU; scripts/plan.py estimates training on one that hardware.preset names")
    return "\n".join(lines)


def _planned(loop: OwnLoop, recipe: str) -> list[str]:
    """Return the overrides of a training step, with the amount of data where it is not made yet."""
    if loop.data is not None:
        return loop.settings[recipe]
    tokens = loop.prompt_tokens + ANSWER_TOKENS
    train = max(1, loop.num_prompts - HELD_OUT)
    workload = {"num_conversations": train, "mean_tokens": tokens, "label_share": ANSWER_TOKENS / tokens}
    return [*loop.settings[recipe], *(f"workload.{key}={value}" for key, value in workload.items())]


def _minutes(seconds: float) -> str:
    if seconds < 60:
        return "under 1 min"
    return f"{seconds / 60:,.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"


def _memory_here() -> str:
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / GIB:.0f} GiB"

"""The config of the scale benchmark, and of the processes that it starts. Imports no torch."""

from __future__ import annotations

from configs.schema import HeadsConfig
from configs.settings import NonNegativeInt, PositiveInt, Settings


class BenchScaleConfig(Settings):
    """`scripts/bench_scale.py`: several processes beside one, padding, and the time of checkpoints and of waiting for data."""

    recipe: str = "configs/heads/eagle3.yaml"  # of `train/heads.py`
    cache: str | None = "runs/heads/cache"  # of its data; None: the target runs on every batch
    num_processes: PositiveInt = 2  # beside one; with batches of the recipe's size each, and sharing one
    steps: PositiveInt = 24  # timed optimiser steps a run
    warmup_steps: NonNegativeInt = 3  # before them
    repeats: PositiveInt = 5  # runs of each side, in turns
    # Steps between two checkpoints that docs/scaling.md advises, and that checkpoint_share is reckoned for: at 0.6 s a step the
    # work of two minutes
    checkpoint_every_steps: PositiveInt = 200
    checkpoints: PositiveInt = 3  # timed a run
    engines: bool = True  # add the rows of `scripts/engine_comparison.py`, where that is there
    bootstrap_samples: PositiveInt = 2000
    output: str = "docs/results/scale.json"


class ScaleStepsConfig(Settings):
    """`scripts/scale_child.py`: optimiser steps of a recipe, timed in one of several processes."""

    recipe: HeadsConfig = HeadsConfig()
    steps: PositiveInt = 24
    warmup_steps: NonNegativeInt = 3
    checkpoints: NonNegativeInt = 0  # written and timed after the steps
    watch_memory: bool = False  # sampled while the steps run, which slows them a little
    result: str = "steps.json"  # written by the first process

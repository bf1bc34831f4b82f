"""Every engine that can split a run over processes, beside one process: the loss of each step must be the same.

    make engine-check          the slow tests, then this

The entries themselves, started by `accelerate launch` with the files of `configs/accelerate/`, in two processes over gloo on
the CPU: float32, a tiny random target, equal batches in all. Each engine's loss curve is compared with that of one process
that takes twice as many micro-batches a step. Ends with 1 where one differs by more than the tolerance.

Left out: GPUs, which would need two of them.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.files import CHECKOUT
from scripts.lab.bench.harness import write_results
from scripts.lab.fault_injection.setup import TinyProject
from scripts.lab.settings import EngineComparisonSettings
from train.telemetry.metrics_file import METRICS_FILE, read_metrics

log = logging.getLogger("draftsmith")

WORLD_SIZE = 2
BATCH_SIZE = 2  # conversations a process and micro-step
TRIED_ON = f"{WORLD_SIZE} processes over gloo on a CPU"


def check_engines(settings: EngineComparisonSettings) -> int:
    """Compare, write the results file, and say by the exit code whether all engines agree with one process."""
    rows = compare_engines(settings)
    write_results(settings.output, "engines", settings, rows=rows, ratios={})
    return DONE if all(row["within_tolerance"] for row in rows) else GATE_FAILED


def compare_engines(settings: EngineComparisonSettings) -> list[dict[str, object]]:
    """Train under every engine; return a row for each and each task, with the largest relative difference of a step's loss."""
    with TemporaryDirectory(prefix="engines-") as scratch:
        folder = Path(scratch)
        _write_inputs(folder, settings)
        rows = []
        for task in settings.tasks:
            alone = _train(folder, settings, task, None)
            rows += [_row(settings, task, engine, alone, _train(folder, settings, task, engine)) for engine in settings.engines]
        return rows


def largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference of a step's loss, as a share of the expected one, of curves of the same length."""
    return max(abs(loss - other) / abs(other) for loss, other in zip(losses, expected, strict=True))


def read_losses(output: Path) -> list[float]:
    """Return the training loss of each step of a run."""
    return read_metric(output, "loss")


def read_metric(output: Path, name: str) -> list[float]:
    """Return a training metric of each step of a run; after a resume, the later value of a step."""
    values = {row["step"]: row[name] for row in read_metrics(output / METRICS_FILE) if name in row}
    return [values[step] for step in sorted(values)]


def split_everything(recipe: Path, folder: Path) -> Path:
    """Return a copy of an accelerate config whose DeepSpeed config splits weights however small, as a tiny model's all are."""
    import yaml

    config = yaml.safe_load(recipe.read_text())
    if "deepspeed_config" in config:
        deepspeed = json.loads((CHECKOUT / config["deepspeed_config"]["deepspeed_config_file"]).read_text())
        if deepspeed["zero_optimization"]["stage"] == 3:
            deepspeed["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        copy = folder / f"{recipe.stem}.json"
        copy.write_text(json.dumps(deepspeed))
        config["deepspeed_config"]["deepspeed_config_file"] = str(copy)
    made = folder / recipe.name
    made.write_text(yaml.safe_dump(config))
    return made


def _write_inputs(folder: Path, settings: EngineComparisonSettings) -> None:
    """Make a target, data and a config file for each task."""
    project = TinyProject(folder, num_prompts=2 * WORLD_SIZE * BATCH_SIZE * settings.steps)  # all steps within an epoch
    project.create()
    schedule = {"batch_size": BATCH_SIZE, "max_steps": settings.steps, "trackers": ["tensorboard"], "resume": False}
    evaluated = {"eval_every_steps": settings.steps, "checkpoint_every_steps": settings.steps}
    distill = project.distill(folder, **schedule, **evaluated)
    heads = project.heads(folder, **schedule, **evaluated)
    quiet = heads.head.model_copy(update={"keep_share": 1.0})  # origins are drawn in each process by itself
    for name, config in (("distill", distill), ("heads", heads.model_copy(update={"head": quiet}))):
        (folder / f"{name}.yaml").write_text(json.dumps(config.model_dump(mode="json")))  # JSON is YAML


def _train(folder: Path, settings: EngineComparisonSettings, task: str, engine: str | None) -> list[float]:
    """Train from the entry and return the loss of each step; `engine` None: in one process."""
    output, python = folder / f"{task}-{engine}", sys.executable
    launcher: list[str] = []
    if engine is not None:
        python = settings.python or python if engine.startswith("zero") else python
        recipe = split_everything(CHECKOUT / "configs" / "accelerate" / f"{engine}.yaml", folder)
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(recipe), "--num_processes", str(WORLD_SIZE)]
    accumulated = WORLD_SIZE if engine is None else 1
    changes = [f"output={output}", f"schedule.gradient_accumulation_steps={accumulated}"]
    command = [python, *launcher, str(CHECKOUT / "train" / f"{task}.py"), "--config", str(folder / f"{task}.yaml")]
    done = subprocess.run(
        [*command, *(part for change in changes for part in ("--set", change))],
        cwd=CHECKOUT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=settings.seconds,
        check=False,
    )
    if done.returncode != DONE:
        raise RuntimeError(f"{task} under {engine or 'one process'} ended with {done.returncode}: {done.stderr[-2000:]}")
    return read_losses(output)


def _row(
    settings: EngineComparisonSettings, task: str, engine: str, alone: Sequence[float], together: Sequence[float]
) -> dict[str, object]:
    difference = largest_difference(together, alone)
    log.info("%s, %s: losses differ from one process's by at most %.2g of theirs", engine, task, difference)
    return {
        "recipe": engine,
        "stage": task,
        "world_size": WORLD_SIZE,
        "steps": len(together),
        "loss_difference": difference,
        "tolerance": settings.tolerance,
        "within_tolerance": difference <= settings.tolerance,
        "where": TRIED_ON,
    }

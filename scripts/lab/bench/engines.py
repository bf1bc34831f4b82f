"""Every engine that can split a run over processes, beside one process: the loss of each step must be the same.

The entries themselves, in two processes over gloo on the CPU. For `benchmark.py scale`, too: what a process holds of a target
that several share.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.files import CHECKOUT
from configs.schema.target import TargetConfig
from configs.schema.training import HeadsConfig
from heads.frozen.loading import Target, load_target
from heads.frozen.processes import join_processes
from scripts.lab.fault_injection.children import Child
from scripts.lab.fault_injection.setup import TinyProject
from scripts.lab.settings import EngineComparisonSettings
from train.telemetry.records import METRICS_FILE, read_lines

log = logging.getLogger("draftsmith")

WORLD_SIZE = 2
BATCH_SIZE = 2  # conversations a process and micro-step
TRIED_ON = f"{WORLD_SIZE} processes over gloo on a CPU"
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
SPLITS = {"target_memory_tensor2": ("tensor", 2), "target_memory_shard4": ("shard", 4)}


def check_engines(settings: EngineComparisonSettings) -> int:
    return DONE if all(row["within_tolerance"] for row in compare_engines(settings)) else GATE_FAILED


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


def hold_shares(settings: EngineComparisonSettings, kind: str, size: int) -> dict[str, Any]:
    """Load the target in so many processes that share it; return what the one that holds most has of it."""
    with TemporaryDirectory(prefix="split-") as scratch:
        folder = Path(scratch)
        own = load_target(TargetConfig(name=settings.target, device="cpu", dtype="float32"))
        heads = own.model.config.get_text_config().num_key_value_heads
        name = settings.target
        if kind == "tensor" and heads % size:
            name = str(folder / "target")
            _save_divisible(own, size, Path(name))
        del own
        shares = _load_in(folder, name, size)
    most = max(shares, key=lambda each: each["held"])
    return {
        "parallel": f"{kind} {size}",
        "target": settings.target if name == settings.target else f"random weights, {heads + heads % size} key and value heads",
        "held_bytes": most["held"],
        "whole_bytes": most["whole"],
    }


def _save_divisible(target: Target, size: int, folder: Path) -> None:
    """Save a target like this one, with so many more heads of the same width that `size` divides them."""
    config = deepcopy(target.model.config)
    ratio, width = config.num_attention_heads // config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    config.num_key_value_heads += -config.num_key_value_heads % size
    config.num_attention_heads = ratio * config.num_key_value_heads
    config.hidden_size = width * config.num_attention_heads
    config.intermediate_size = config.intermediate_size * config.hidden_size // target.model.config.hidden_size
    type(target.model)(config).save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)


def _load_in(folder: Path, name: str, num_processes: int) -> list[dict[str, int]]:
    output = folder / f"held-{num_processes}"
    output.mkdir()
    target = {"name": name, "device": "cpu", "dtype": "float32", "shards": num_processes}
    config = HeadsConfig.model_validate({"target": target, "output": str(output)})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "ACCELERATE_USE_CPU": "true"}
    children = []
    for rank in range(num_processes):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
        environment = place | {key: str(value) for key, value in ranks.items()}
        children.append(Child(_hold, config, folder, f"holding-{num_processes}-{rank}", environment=environment))
    for child in children:
        if child.end(600) != DONE:
            raise RuntimeError(f"{num_processes} processes could not load {name}: {child.said[-2000:]}")
    return [json.loads(file.read_text()) for file in sorted(output.glob("*.json"))]


def _hold(config: HeadsConfig) -> int:
    state = join_processes(config.target)
    target = load_target(config.target)
    weights = list(target.model.parameters())
    local = [getattr(each, "_local_tensor", each) for each in weights]
    held = {
        "held": sum(each.nbytes for each in local if not each.is_meta),
        "whole": sum(each.numel() * each.element_size() for each in weights),
    }
    (Path(config.output) / f"{state.process_index}.json").write_text(json.dumps(held))
    state.wait_for_everyone()
    return DONE


def largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference of a step's loss, as a share of the expected one, of curves of the same length."""
    return max(abs(loss - other) / abs(other) for loss, other in zip(losses, expected, strict=True))


def read_losses(output: Path) -> list[float]:
    return read_metric(output, "loss")


def read_metric(output: Path, name: str) -> list[float]:
    """Return a training metric of each step of a run; after a resume, the later value of a step."""
    values = {row["step"]: row[name] for row in read_lines(output / METRICS_FILE) if name in row}
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
    project = TinyProject(folder, num_prompts=2 * WORLD_SIZE * BATCH_SIZE * settings.steps)  # all steps within an epoch
    project.create()
    if settings.on_gpus:
        project.target["device"] = "auto"
    schedule = {"batch_size": BATCH_SIZE, "max_steps": settings.steps, "trackers": ["tensorboard"], "resume": False}
    evaluated = {"eval_every_steps": settings.steps, "checkpoint_every_steps": settings.steps}
    distill = project.distill(folder, **schedule, **evaluated)
    heads = project.heads(folder, **schedule, **evaluated)
    quiet = heads.head.model_copy(update={"keep_share": 1.0})  # origins are drawn in each process by itself
    for name, config in (("distill", distill), ("heads", heads.model_copy(update={"head": quiet}))):
        (folder / f"{name}.yaml").write_text(json.dumps(config.model_dump(mode="json")))  # JSON is YAML


def _train(folder: Path, settings: EngineComparisonSettings, task: str, engine: str | None) -> list[float]:
    """Train from the entry and return the loss of each step; `engine` None: in one process."""
    output = folder / f"{task}-{engine}"
    launcher: list[str] = []
    if engine is not None:
        recipe = split_everything(CHECKOUT / "configs" / "accelerate" / f"{engine}.yaml", folder)
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(recipe), "--num_processes", str(WORLD_SIZE)]
    accumulated = WORLD_SIZE if engine is None else 1
    changes = [f"output={output}", f"schedule.gradient_accumulation_steps={accumulated}"]
    command = [sys.executable, *launcher, str(CHECKOUT / "train" / f"{task}.py"), "--config", str(folder / f"{task}.yaml")]
    done = subprocess.run(
        [*command, *(part for change in changes for part in ("--set", change))],
        cwd=CHECKOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | ({} if settings.on_gpus else ON_CPU),
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
        "where": f"{WORLD_SIZE} GPUs" if settings.on_gpus else TRIED_ON,
    }

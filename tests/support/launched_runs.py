"""Whole runs of the training entries' work in processes of their own, with the environment of the recipe files."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from safetensors.torch import load_file

from configs.runtime.command import DONE
from scripts.check.vllm_server import free_port
from tests.support.children import Child
from tests.support.tiny_project import TinyProject
from train.launch import run_distillation, run_heads
from train.loop.telemetry import METRICS_FILE, read_lines

ROOT = Path(__file__).resolve().parents[2]
NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
STEPS, EVERY = 6, 3
TOLERANCE = 1e-5  # of a loss, as a share; of a weight


def launch_arguments(recipe):
    """Return the arguments of `accelerate launch` with this recipe, as it completes them."""
    port = ["--main_process_port", str(free_port())]  # the default may be in use here
    arguments = launch_command_parser().parse_args(["--config_file", str(recipe), *port, "train/distill.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    return arguments


def environment_of(recipe: Path) -> dict[str, str]:
    """Return what `accelerate launch` would set, by its own reading of the file."""
    arguments = launch_arguments(recipe)
    if arguments.use_deepspeed:
        made = prepare_deepspeed_cmd_env(arguments)[1]
    elif arguments.multi_gpu or arguments.use_fsdp:
        made = prepare_multi_gpu_env(arguments)
    else:
        return {"ACCELERATE_USE_CPU": str(arguments.use_cpu)}
    named = {"ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_DEEPSPEED_CONFIG_FILE"}
    kept = {name: value for name, value in made.items() if name.startswith(("ACCELERATE_", "FSDP_")) or name in named}
    return {name: value for name, value in kept.items() if os.environ.get(name) != value}


class Runs:
    """Runs of the entries' work, each done once; see the module's fixture."""

    def __init__(self, folder: Path, **project: int) -> None:
        self.folder, self.children, self.done = folder, [], {}
        self.project = TinyProject(folder, **project)
        self.project.create()
        AcceleratorState._reset_state()
        PartialState._reset_state()

    def config(self, name, task, num_processes, changes=None, **schedule):
        make = self.project.distill if task == "distill" else self.project.heads
        rhythm = {"batch_size": 2, "max_steps": STEPS, "eval_every_steps": STEPS, "checkpoint_every_steps": EVERY}
        rhythm |= {"trackers": ["tensorboard"], "gradient_accumulation_steps": 2 // num_processes}
        config = make(self.folder / name, **rhythm | schedule)
        head = {} if task == "distill" else {"head": {"kind": "eagle3", "taps": [0, 1, 2]}}  # which draws no random numbers
        return type(config).model_validate(config.model_dump() | head | (changes or {}))

    def start(self, config, recipe, num_processes=2, before=None, main=None):
        """Start a run's processes; `recipe` None: one, without a launcher."""
        environment = {}
        if recipe is not None:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            split = split_everything(ROOT / "configs" / "accelerate" / f"{recipe}.yaml", self.folder)
            environment = environment_of(split) | address
        main = main or (run_distillation if type(config).__name__ == "DistillConfig" else run_heads)
        started = []
        for rank in range(num_processes):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
            placed = environment | {name: str(value) for name, value in place.items()} if recipe else {}
            name = f"child-{len(self.children)}"
            started.append(Child(main, config, self.folder, name, before=before, environment=placed))
            self.children.append(started[-1])
        return started

    def finished(self, recipe, task, changes=None, before=None):
        """Return the output of a run that nothing disturbs, in two processes, or in one where `recipe` is None."""
        key = f"{recipe}-{task}" + ("" if changes is None else f"-{len(self.done)}")
        if key not in self.done:
            num_processes = 1 if recipe is None else 2
            config = self.config(key, task, num_processes, changes)
            children = self.start(config, recipe, num_processes, before)
            assert [child.end() for child in children] == [DONE] * num_processes, [child.said[-3000:] for child in children]
            self.done[key] = self.folder / key
        return self.done[key]


def split_everything(recipe: Path, folder: Path) -> Path:
    """Return a copy of an accelerate config whose DeepSpeed config splits weights however small, as a tiny model's all are."""
    config = yaml.safe_load(recipe.read_text())
    if "deepspeed_config" in config:
        deepspeed = json.loads((ROOT / config["deepspeed_config"]["deepspeed_config_file"]).read_text())
        if deepspeed["zero_optimization"]["stage"] == 3:
            deepspeed["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        copy = folder / f"{recipe.stem}.json"
        copy.write_text(json.dumps(deepspeed))
        config["deepspeed_config"]["deepspeed_config_file"] = str(copy)
    made = folder / recipe.name
    made.write_text(yaml.safe_dump(config))
    return made


def largest_difference(losses, expected) -> float:
    """Return the largest difference of a step's value, as a share of the expected one, of curves of the same length."""
    return max(abs(loss - other) / abs(other) for loss, other in zip(losses, expected, strict=True))


def read_metric(output: Path, name: str) -> list[float]:
    """Return a training metric of each step of a run; after a resume, the later value of a step."""
    values = {row["step"]: row[name] for row in read_lines(output / METRICS_FILE) if name in row}
    return [values[step] for step in sorted(values)]


def assert_same_metrics(found: Path, expected: Path) -> None:
    for name in ("loss", "gradient_norm"):  # AdamW would hide a factor that all gradients are wrong by
        assert largest_difference(read_metric(found, name), read_metric(expected, name)) < TOLERANCE, name


def assert_same(found: Path, expected: Path) -> None:
    """Two runs had the same losses and gradients, and the same weights in the end."""
    losses = read_metric(expected, "loss")
    assert len(set(losses)) == len(losses) >= STEPS
    assert_same_metrics(found, expected)
    files = (folder / "artifact" / "model.safetensors" for folder in (found, expected))
    torch.testing.assert_close(*map(load_file, files), rtol=0, atol=TOLERANCE)

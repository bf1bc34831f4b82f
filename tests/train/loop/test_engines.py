"""Whole runs under each engine: the entries' work in two processes on the CPU, with the environment of the recipe files."""

import itertools
import json
import math
import os
import re
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from configs.runtime.command import DONE
from configs.runtime.errors import FAILED, ConfigError, InputError
from configs.schema.training import DistillConfig, OptimizerConfig, ScheduleConfig
from tests.faults.conftest import die_at_step
from tests.support.launched_runs import (
    EVERY,
    NEEDS_DEEPSPEED,
    Runs,
    assert_same,
    assert_same_metrics,
    read_metric,
)
from train import launch
from train.loop import engines, loop
from train.loop.checkpoints import list_checkpoints
from train.loop.engines import Fsdp2Engine
from train.tasks.draft import DraftTask

QUICK = [("ddp_cpu", "heads"), ("fsdp2", "distill"), ("zero3", "distill")]
ZERO = ["zero2", "zero3", "zero3_offload"]
PAIRS = [(recipe, task) for recipe in ("ddp_cpu", "fsdp2", *ZERO) for task in ("distill", "heads")]
PAIRS = [pair for pair in PAIRS if pair[1] == "distill" or not pair[0].startswith("zero3")]  # which no head is trained by


def cases(pairs, quick):
    """Return test cases, slow where they are not among the quick ones."""
    return [
        pytest.param(
            *pair,
            marks=[
                *([NEEDS_DEEPSPEED] if (pair[0] or "").startswith("zero") else []),
                *([] if pair in quick else [pytest.mark.slow]),
            ],
        )
        for pair in pairs
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("engines"))
    yield runs
    for child in runs.children:
        child.kill()


def weights_are_split() -> None:
    """Plant a check: once the engine has a draft, no process holds a whole weight."""
    plain = engines.DeepSpeedEngine.prepare

    def prepare(self, *args):
        made = plain(self, *args)
        assert self.shards_weights
        assert not any(each.numel() for each in made[0].parameters())
        return made

    engines.DeepSpeedEngine.prepare = prepare


@pytest.mark.parametrize(("recipe", "task"), cases(PAIRS, QUICK))
def test_two_processes_have_the_losses_and_the_weights_of_one(runs, recipe, task):
    before = weights_are_split if recipe == "zero3" and task == "distill" else None
    assert_same(runs.finished(recipe, task, before=before), runs.finished(None, task))


@pytest.mark.parametrize("recipe", cases([("zero2",), ("zero3",)], []))
def test_a_killed_run_goes_on_to_what_an_undisturbed_one_ends_with(runs, recipe):
    config = runs.config(f"killed-{recipe}", "distill", 2)
    killed = runs.start(config, recipe, before=die_at_step(5))
    assert [child.end() for child in killed] == [-signal.SIGKILL] * 2
    again = runs.start(config, recipe)
    assert [child.end() for child in again] == [DONE] * 2, again[0].said
    assert "resumed from" in again[0].said
    output, whole = Path(config.output), runs.finished(recipe, "distill")
    assert read_metric(output, "loss") == read_metric(whole, "loss")
    files = (folder / "artifact" / "model.safetensors" for folder in (output, whole))
    assert len({file.read_bytes() for file in files}) == 1


def poison(gradient, number):
    """Plant a gradient that is not finite at a micro-batch of the first process, of which `number` counts from 1."""

    def plant():
        plain, calls = DraftTask.loss, itertools.count(1)

        def loss(*args):
            outcome = plain(*args)
            if next(calls) == number and os.environ.get("RANK", "0") == "0":
                outcome.loss.register_hook(lambda given: torch.full_like(given, gradient))
            return outcome

        DraftTask.loss = loss

    return plant


POISONED = [(None, math.nan), *((recipe, math.inf) for recipe in ("ddp_cpu", "fsdp2", "zero2", "zero3"))]


@pytest.mark.parametrize(("recipe", "gradient"), cases(POISONED, POISONED[:2]))
def test_a_gradient_that_is_not_finite_ends_the_run_before_its_step_and_its_checkpoint(runs, recipe, gradient):
    num_processes = 1 if recipe is None else 2
    config = runs.config(f"poisoned-{recipe}-{gradient}", "distill", num_processes)
    children = runs.start(config, recipe, num_processes, before=poison(gradient, (2 * EVERY - 1) * (2 // num_processes) + 1))
    assert [child.end() for child in children] == [FAILED] * num_processes, children[0].said[-3000:]
    assert re.search(rf"the norm of the gradient is (inf|nan) in step {2 * EVERY} ", children[0].said)
    assert [path.name for path in list_checkpoints(Path(config.output) / "checkpoints")] == [f"step-{EVERY:08d}"]
    again = runs.start(config, recipe, num_processes)
    assert [child.end() for child in again] == [DONE] * num_processes, again[0].said[-3000:]
    assert_same(Path(config.output), runs.finished(recipe, "distill"))


ACCUMULATING = [("fsdp2",), ("zero2",), ("zero3",), ("zero3_offload",)]


@pytest.mark.parametrize("recipe", cases(ACCUMULATING, [("zero2",)]))
def test_a_step_is_taken_after_its_last_micro_batch_only(runs, recipe):
    def config(name, num_processes):
        length = {"batch_size": 1, "gradient_accumulation_steps": 4 // num_processes, "max_steps": 6}
        clipped = {"optimizer": {"learning_rate": 3e-3, "max_grad_norm": 0.05}}
        return runs.config(name, "distill", num_processes, clipped, **length)

    together, alone = config(f"accumulated-{recipe}", 2), config("accumulated", 1)
    if not Path(alone.output).exists():
        assert [child.end() for child in runs.start(alone, None, num_processes=1)] == [DONE]
    children = runs.start(together, recipe)
    assert [child.end() for child in children] == [DONE] * 2, children[0].said[-3000:]
    assert_same_metrics(Path(together.output), Path(alone.output))
    assert min(read_metric(Path(alone.output), "gradient_norm")) > 0.05  # so that each step was clipped


NEW = {"layers": None, "init": "fresh", "train_embeddings": True}
TIED = {"num_hidden_layers": 1, "tie_word_embeddings": True}
VARIANTS = {
    "adapters": {"layers": [0], "lora": {"rank": 4}},
    "tied": NEW | {"overrides": TIED, "draft_vocab_size": 40},
}


@pytest.mark.parametrize(
    ("recipe", "variant"), cases([(recipe, name) for recipe in ("fsdp2", "zero3") for name in VARIANTS], [])
)
def test_so_it_is_with_adapters_and_with_a_tied_head_of_a_reduced_vocabulary(runs, recipe, variant):
    changes = {"student": VARIANTS[variant]}
    assert_same(runs.finished(recipe, "distill", changes), runs.finished(None, "distill", changes))


def test_the_deepspeed_file_that_a_recipe_names_is_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    named = []
    monkeypatch.setenv(launch.DEEPSPEED_FILE, "configs/deepspeed/zero2.json")
    monkeypatch.setattr(
        launch,
        "Accelerator",
        lambda **_: named.append(os.environ[launch.DEEPSPEED_FILE]) or SimpleNamespace(device=torch.device("cpu")),
    )
    launch.make_accelerator(ScheduleConfig(trackers=[]), tmp_path)
    assert json.loads(Path(named[0]).read_text())["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize("name", ["optimizer", "scheduler", "bf16"])
def test_what_the_recipe_decides_is_no_business_of_deepspeeds_config_file(name, caplog):
    asked = {name: {"type": "Adam", "enabled": True}, "gradient_clipping": 0.5}
    plugin = SimpleNamespace(zero_stage=2, deepspeed_config={"zero_optimization": {"stage": 2}, **asked})
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    schedule = ScheduleConfig(mixed_precision="no")
    with pytest.raises(ConfigError, match=f"^{name} of DeepSpeed's config file"):
        engines.DeepSpeedEngine(accelerator, schedule, OptimizerConfig())
    del plugin.deepspeed_config[name]
    engines.DeepSpeedEngine(accelerator, schedule, OptimizerConfig())
    assert plugin.deepspeed_config["gradient_clipping"] == OptimizerConfig().max_grad_norm
    assert "gradient_clipping 0.5" in caplog.text


@pytest.mark.parametrize("recipe", cases([("zero2",), ("zero3",)], [("zero2",)]))
def test_gradients_of_products_in_bfloat16_are_added_up_and_sent_in_float32(runs, recipe):
    def in_float32():
        plain = engines.DeepSpeedEngine.prepare

        def prepare(self, *args):
            made = plain(self, *args)
            assert made[0].get_data_types() == (torch.bfloat16, torch.float32)
            assert made[0].communication_data_type == torch.float32
            return made

        engines.DeepSpeedEngine.prepare = prepare

    config = runs.config(f"bf16-{recipe}", "distill", 2, mixed_precision="bf16", gradient_accumulation_steps=4, max_steps=2)
    children = runs.start(config, recipe, before=in_float32)
    assert [child.end() for child in children] == [DONE] * 2, children[0].said[-3000:]


@pytest.mark.parametrize(
    ("complaint", "key"),
    [("bf16 mixed precision requires", "schedule.mixed_precision"), ("no such backend", "accelerate's config")],
)
def test_what_accelerate_refuses_is_told_by_the_setting_that_it_is_about(monkeypatch, tmp_path, complaint, key):
    def refuse(**_):
        raise ValueError(complaint)

    monkeypatch.setattr(launch, "Accelerator", refuse)
    with pytest.raises(ConfigError, match=f"^{key}"):
        launch.make_accelerator(ScheduleConfig(trackers=[]), tmp_path)


@pytest.mark.parametrize(("device", "complaint"), [("cpu:0", "/train"), ("meta", r"^target\.device")])
def test_the_targets_device_may_be_named_with_its_number(device, complaint, tmp_path):
    config = DistillConfig(target={"device": device}, data={name: str(tmp_path / name) for name in ("train", "held_out")})
    with pytest.raises(InputError, match=complaint):
        launch.load_materials(config, SimpleNamespace(device=torch.device("cpu")))


SUMS, SPLIT_SUMS = "c10d::allreduce_", "c10d::_reduce_scatter_base_"


def counting(file: Path):
    """Return what has a child write which collectives its third step took, and how many units FSDP2 has."""

    def plant() -> None:
        plain_step, plain_prepare, units = loop.Training.step, Fsdp2Engine.prepare, []

        def prepare(self, task, make):
            units.extend(task.units())
            return plain_prepare(self, task, make)

        def step(self, *args):
            if self.progress.step != 2:
                return plain_step(self, *args)
            with profile(activities=[ProfilerActivity.CPU]) as recorded:
                labels = plain_step(self, *args)
            counts = Counter(each.name for each in recorded.events() if each.name.startswith("c10d::"))
            file.write_text(json.dumps({"counts": counts, "units": len(units) + 1}))
            return labels

        loop.Training.step, Fsdp2Engine.prepare = step, prepare

    return plant


def collectives(runs, recipe, accumulated):
    file = runs.folder / f"{recipe}-{accumulated}.json"
    length = {"max_steps": 3, "eval_every_steps": 3, "gradient_accumulation_steps": accumulated}
    children = runs.start(runs.config(file.stem, "distill", 2, **length), recipe, before=counting(file))
    assert [child.end() for child in children] == [DONE] * 2, [child.said[-3000:] for child in children]
    found = json.loads(file.read_text())
    return Counter(found["counts"]), found["units"]


@pytest.mark.parametrize("recipe", cases([("ddp_cpu",), ("fsdp2",), ("zero2",)], [("ddp_cpu",), ("fsdp2",)]))
def test_gradients_are_sent_with_the_last_micro_batch_of_a_step_only(runs, recipe):
    (one, units), (three, _) = (collectives(runs, recipe, number) for number in (1, 3))
    assert (one[SUMS], one[SPLIT_SUMS]) == (three[SUMS], three[SPLIT_SUMS]), (one, three)
    assert one[SPLIT_SUMS] == (units if recipe == "fsdp2" else 0), one
    assert one[SUMS] > (recipe != "fsdp2")  # the labels are added up as well


@pytest.mark.parametrize("recipe", ["ddp_cpu", "fsdp2"])
def test_a_run_that_loses_a_process_goes_on_with_the_same_steps(runs, recipe):
    """Also where an epoch's last step has fewer conversations than micro-batches."""
    config = runs.config(f"loses-one-{recipe}", "distill", 2, max_steps=12)
    killed = runs.start(config, recipe, before=die_at_step(5))
    assert [child.end() for child in killed] == [-signal.SIGKILL] * 2
    lone, undisturbed = (runs.config(f"{name}-{recipe}", "distill", 1, max_steps=12) for name in ("loses-one", "whole"))
    alone, whole = (runs.start(each, recipe, num_processes=1)[0] for each in (lone, undisturbed))
    assert (alone.end(), whole.end()) == (DONE, DONE), [each.said[-3000:] for each in (alone, whole)]
    assert "resumed from" in alone.said
    assert_same(Path(config.output), Path(undisturbed.output))

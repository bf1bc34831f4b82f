"""What processes send in a step of several micro-batches, and runs that go on with fewer processes; over gloo on the CPU."""

import json
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile

from configs.runtime.command import DONE
from configs.runtime.errors import ConfigError
from configs.schema.training import ScheduleConfig
from tests.faults.conftest import die_at_step
from tests.support.launched_runs import NEEDS_DEEPSPEED, TOLERANCE, Runs, assert_same, assert_same_metrics
from train.loop import loop
from train.loop.engines import Fsdp2Engine
from train.loop.lineage import accumulating

HEADS = {"mtp": {"kind": "mtp"}, "dflash": {"kind": "dflash", "taps": [0, 1, 2]}}
SUMS, SPLIT_SUMS = "c10d::allreduce_", "c10d::_reduce_scatter_base_"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("overlap"))
    yield runs
    for child in runs.children:
        child.kill()


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


def collectives(runs, recipe, task, accumulated, head):
    file = runs.folder / f"{recipe}-{task}-{accumulated}.json"
    changes = {"head": HEADS[head]} if head else None
    length = {"max_steps": 3, "eval_every_steps": 3, "gradient_accumulation_steps": accumulated}
    config = runs.config(file.stem, task, 2, changes, **length)
    children = runs.start(config, recipe, before=counting(file))
    assert [child.end() for child in children] == [DONE] * 2, [child.said[-3000:] for child in children]
    found = json.loads(file.read_text())
    return Counter(found["counts"]), found["units"]


@pytest.mark.parametrize(
    ("recipe", "task", "head"),
    [
        ("ddp_cpu", "distill", None),
        ("fsdp2", "distill", None),
        pytest.param("zero2", "distill", None, marks=[pytest.mark.slow, NEEDS_DEEPSPEED]),
    ],
)
def test_gradients_are_sent_with_the_last_micro_batch_of_a_step_only(runs, recipe, task, head):
    (one, units), (three, _) = (collectives(runs, recipe, task, number, head) for number in (1, 3))
    assert (one[SUMS], one[SPLIT_SUMS]) == (three[SUMS], three[SPLIT_SUMS]), (one, three)
    assert one[SPLIT_SUMS] == (units if recipe == "fsdp2" else 0), one
    assert one[SUMS] > (recipe != "fsdp2")  # the labels are added up as well


@pytest.mark.parametrize("kind", ["dflash", pytest.param("mtp", marks=pytest.mark.slow)])
def test_a_head_of_several_units_has_the_losses_and_the_weights_of_a_whole_one(runs, kind):
    """Both in two processes, since some families draw which positions they train."""
    found, expected = (runs.finished(recipe, "heads", {"head": HEADS[kind]}) for recipe in ("fsdp2", "ddp_cpu"))
    assert_same_metrics(found, expected)
    files = (folder / "artifact" / "model.safetensors" for folder in (found, expected))
    torch.testing.assert_close(*map(load_file, files), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("recipe", ["ddp_cpu", "fsdp2"])
def test_a_run_that_loses_a_process_goes_on_with_the_same_steps(runs, recipe):
    """Also where an epoch's last step has fewer conversations than micro-batches."""
    schedule = {"micro_batches_per_step": 2, "max_steps": 12}
    config, undisturbed = (runs.config(f"{name}-{recipe}", "distill", 2, **schedule) for name in ("loses-one", "whole"))
    killed = runs.start(config, recipe, before=die_at_step(5))
    assert [child.end() for child in killed] == [-signal.SIGKILL] * 2
    alone, whole = (runs.start(each, recipe, num_processes=1)[0] for each in (config, undisturbed))
    assert (alone.end(), whole.end()) == (DONE, DONE), [each.said[-3000:] for each in (alone, whole)]
    assert "resumed from" in alone.said
    assert_same(Path(config.output), Path(undisturbed.output))


def test_a_step_is_shared_evenly_by_any_number_of_processes_that_divides_it():
    schedule = ScheduleConfig(micro_batches_per_step=12)
    assert [accumulating(schedule, n).gradient_accumulation_steps for n in (1, 3, 12)] == [12, 4, 1]
    assert accumulating(ScheduleConfig(gradient_accumulation_steps=3), 2).gradient_accumulation_steps == 3
    with pytest.raises(ConfigError, match="12 cannot be shared evenly by 5 processes"):
        accumulating(schedule, 5)
    with pytest.raises(ValueError, match="give one of them"):
        ScheduleConfig(micro_batches_per_step=12, gradient_accumulation_steps=2)

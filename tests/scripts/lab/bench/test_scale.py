"""The scale benchmark on a tiny target: real runs of one and two processes, and shares against sums by hand."""

import json
import mmap
import subprocess
from dataclasses import asdict
from functools import partial

import pytest

from configs.runtime.command import DONE
from configs.runtime.errors import ConfigError, InputError
from scripts.lab.bench import scale as scale_comparison
from scripts.lab.bench.scale import (
    check_shares,
    run_steps,
    tokens_among_positions,
    with_cache,
)
from scripts.lab.bench.scale_steps import Clocked, Steps, measure_steps, own_bytes, watching
from scripts.lab.benchmark import run
from scripts.lab.fault_injection.children import Child
from scripts.lab.settings import BenchScaleConfig, ScaleStepsConfig
from tests.faults.conftest import start_pair


@pytest.fixture(scope="module")
def folder(recipe, tmp_path_factory):
    """A folder with a recipe `eagle3.yaml` on the tiny data; only for reading."""
    folder = tmp_path_factory.mktemp("scale")
    head = {"kind": "eagle3", "taps": [0, 1, 2], "num_depths": 2}
    schedule = {"batch_size": 2, "mixed_precision": "no"}
    recipe = {**recipe, "head": head, "schedule": schedule}
    (folder / "eagle3.yaml").write_text(json.dumps(recipe))
    return folder


def steps(num_processes=1, *, seconds=2.0, tokens=100, waited=0.1, checkpoint=0.5):
    return Steps(
        num_processes=num_processes,
        steps=10,
        seconds=seconds,
        tokens=tokens,
        input_seconds=waited,
        checkpoint_seconds=checkpoint,
        baseline_bytes=1000,
        peak_bytes=5000,
    )


def bench(folder, **settings):
    tiny = {"recipe": str(folder / "eagle3.yaml"), "cache": None, "steps": 2, "warmup_steps": 1, "repeats": 1, "checkpoints": 1}
    return BenchScaleConfig.model_validate(tiny | settings)


def test_real_steps_of_one_and_two_processes_see_the_same_number_of_tokens(folder, tmp_path):
    recipe = with_cache(bench(folder))

    def config(name):
        own = recipe.model_copy(update={"output": str(tmp_path / name)})
        result = str(tmp_path / f"{name}.json")
        return ScaleStepsConfig(recipe=own, steps=2, warmup_steps=1, checkpoints=1, result=result)

    children = [Child(measure_steps, config("one"), tmp_path, "one")]
    children += start_pair(partial(Child, folder=tmp_path, name="two"), measure_steps, config("two"))
    assert [child.end() for child in children] == [DONE] * 3, children[1].said
    alone, together = (Steps(**json.loads((tmp_path / f"{name}.json").read_text())) for name in ("one", "two"))
    assert (alone.num_processes, together.num_processes) == (1, 2)
    assert 0 < alone.tokens < together.tokens
    for taken in (alone, together):
        assert taken.steps == 2
        assert 0 < taken.input_seconds < taken.seconds
        assert taken.checkpoint_seconds > 0
        assert taken.peak_bytes == 0  # not watched


def test_the_file_holds_the_ratios_with_their_bounds_and_the_plan(folder, tmp_path, monkeypatch):
    speeds = {(1, 2): [100, 110, 90], (2, 2): [180, 200, 170], (2, 1): [150, 160, 140]}

    def run_once(recipe, config, num_processes, folder, *, watch_memory=False):
        return steps(num_processes, tokens=100 if watch_memory else speeds[num_processes, recipe.schedule.batch_size].pop())

    monkeypatch.setattr(scale_comparison, "run_steps", run_once)
    rows = [{"recipe": "ddp", "stage": "distill", "world_size": 2, "loss_difference": 0.0}]
    monkeypatch.setattr(scale_comparison, "compare_engines", lambda settings: rows)
    held = {"held_bytes": 3, "whole_bytes": 5}
    monkeypatch.setattr(scale_comparison, "hold_shares", lambda settings, kind, size: held)
    output = tmp_path / "scale.json"
    file = tmp_path / "bench.yaml"
    file.write_text(json.dumps(bench(folder, repeats=3, output=str(output)).model_dump(mode="json")))
    assert run(["scale", "--config", str(file)]) == DONE
    content = json.loads(output.read_text())
    ratios = content["ratios"]
    assert content["name"] == "scale"
    assert ratios["two_processes_vs_one"] == pytest.approx(550 / 300)
    assert ratios["two_processes_vs_one_same_global_batch"] == pytest.approx(450 / 300)
    assert ratios["two_processes_vs_one_low"] <= ratios["two_processes_vs_one"] <= ratios["two_processes_vs_one_high"]
    assert ratios["checkpoint_share"] == pytest.approx(0.5 / (0.5 + 200 * 0.2))
    assert ratios["input_share"] == pytest.approx(0.05)
    assert 0 < ratios["packing_efficiency"] <= 1
    assert content["plan"]["measured_bytes"] == 4000
    assert content["plan"]["measured_over_planned_bytes"] == pytest.approx(4000 / content["plan"]["planned_bytes"])
    assert len(content["runs"]) == 9
    assert content["rows"] == rows
    assert (ratios["target_memory_tensor2"], ratios["target_memory_shard4"], content["split_target"]) == (0.6, 0.6, [held] * 2)


def test_padding_is_counted_over_the_batches_of_an_epoch(folder):
    recipe = with_cache(bench(folder))
    one_by_one = recipe.model_copy(update={"schedule": recipe.schedule.model_copy(update={"batch_size": 1})})
    assert tokens_among_positions(one_by_one)["bucketing_efficiency"] == 1
    shares = tokens_among_positions(recipe)
    assert 0 < shares["bucketing_efficiency"] <= 1
    assert 0 < shares["packing_efficiency"] <= 1


def test_batches_that_cannot_be_shared_evenly_and_steps_of_several_micro_batches_are_refused(folder):
    recipe = with_cache(bench(folder))
    with pytest.raises(ConfigError, match="3 processes cannot share batches of 2 evenly"):
        check_shares(recipe, 3)
    schedule = recipe.schedule.model_copy(update={"gradient_accumulation_steps": 4})
    with pytest.raises(ConfigError, match="gradient_accumulation_steps must be 1 here"):
        check_shares(recipe.model_copy(update={"schedule": schedule}), 1)


@pytest.mark.parametrize(
    ("code", "said", "kind", "reason"),
    [
        (2, "10:00:00 INFO loading\nerror: data.train not found: nowhere.jsonl\n", InputError, "not found: nowhere.jsonl"),
        (1, "error: data.train not found: x\ntorch: ChildFailedError\n", InputError, "not found: x"),  # torchrun's own code
        (1, "Traceback\nRuntimeError: the loss is nan\n", RuntimeError, "the loss is nan"),
        (-9, "", RuntimeError, "nothing"),
    ],
)
def test_a_run_that_ends_otherwise_says_why(folder, tmp_path, monkeypatch, code, said, kind, reason):
    ended = subprocess.CompletedProcess([], code, stdout="", stderr=said)
    monkeypatch.setattr(scale_comparison.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(kind, match=f"a run of 2 processes ended with code .*{reason}"):
        run_steps(with_cache(bench(folder)), bench(folder), 2, tmp_path)


def test_several_processes_are_launched_by_torchrun(folder, tmp_path, monkeypatch):
    commands = []

    def run(command, **settings):
        commands.append(command[1:])
        (tmp_path / "steps.json").write_text(json.dumps(asdict(steps())))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(scale_comparison.subprocess, "run", run)
    for num_processes in (1, 2):
        assert run_steps(with_cache(bench(folder)), bench(folder), num_processes, tmp_path) == steps()
    script = [str(scale_comparison.CHILD), "--config", str(tmp_path / "config.yaml")]
    assert commands == [script, ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *script]]


def test_waiting_is_what_the_loader_takes_and_epochs_follow_one_another():
    class Loader(list):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs = (*self.epochs, epoch)

    loader = Loader(["a", "b"])
    batches = Clocked(loader, lambda batches: batches)
    assert [batches.next() for _ in range(5)] == ["a", "b", "a", "b", "a"]
    assert loader.epochs == (0, 1, 2)
    assert batches.seconds > 0


def test_watched_memory_grows_with_what_is_taken():
    before = own_bytes()
    # Mapped, because what the interpreter allocates may come out of memory that it holds already.
    with watching() as peak, mmap.mmap(-1, 30_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        taken.write(b"x" * 30_000_000)
        own = own_bytes()
    assert own - before > 20_000_000
    assert peak[0] >= before

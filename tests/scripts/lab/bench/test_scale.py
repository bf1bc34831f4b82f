"""The scale benchmark on a tiny target: a run, and shares of what their records say."""

import json
import subprocess

import pytest

from configs.runtime.command import BAD_INPUT, DONE
from configs.runtime.errors import InputError
from configs.runtime.loading import load_config
from configs.schema.training import HeadsConfig
from scripts.lab.bench import scale
from scripts.lab.bench.scale import Measured, measure
from scripts.lab.benchmark import run
from scripts.lab.settings import BenchScaleConfig


@pytest.fixture(scope="module")
def path(recipe, tmp_path_factory):
    """A recipe of an EAGLE-3 head on the tiny data; only for reading."""
    path = tmp_path_factory.mktemp("scale") / "eagle3.yaml"
    head = {"kind": "eagle3", "taps": [0, 1, 2], "num_depths": 2}
    path.write_text(json.dumps({**recipe, "head": head, "schedule": {"batch_size": 2, "mixed_precision": "no"}}))
    return path


def bench(path, **settings):
    return BenchScaleConfig.model_validate({"recipe": str(path), "cache": None, "steps": 2, "repeats": 1} | settings)


def test_a_run_is_trained_by_the_entry_and_its_records_are_read(path, tmp_path):
    measured = measure(bench(path), load_config(HeadsConfig, path), 1, tmp_path, 0, 0)
    assert measured.tokens_per_second > 0
    assert measured.step_seconds > 0
    assert 0 < measured.input_share < 1
    assert measured.checkpoint_seconds > 0


def test_the_file_holds_the_ratios_with_their_bounds(path, tmp_path, monkeypatch):
    speeds = {(1, 2): [100, 110, 90], (2, 2): [180, 200, 170], (2, 1): [150, 160, 140]}

    def once(config, recipe, num_processes, *_):
        speed = speeds[num_processes, recipe.schedule.batch_size].pop()
        return Measured(tokens_per_second=speed, step_seconds=0.2, input_share=0.05, checkpoint_seconds=0.5)

    rows = [{"recipe": "ddp", "stage": "distill", "world_size": 2, "loss_difference": 0.0}]
    held = {"held_bytes": 3, "whole_bytes": 5}
    monkeypatch.setattr(scale, "measure", once)
    monkeypatch.setattr(scale, "compare_engines", lambda settings: rows)
    monkeypatch.setattr(scale, "hold_shares", lambda settings, kind, size: held)
    file, output = tmp_path / "bench.yaml", tmp_path / "scale.json"
    file.write_text(json.dumps(bench(path, repeats=3, output=str(output)).model_dump(mode="json")))
    assert run(["scale", "--config", str(file)]) == DONE
    content = json.loads(output.read_text())
    ratios = content["ratios"]
    assert ratios["two_processes_vs_one"] == pytest.approx(550 / 300)
    assert ratios["two_processes_vs_one_same_global_batch"] == pytest.approx(450 / 300)
    assert ratios["two_processes_vs_one_low"] <= ratios["two_processes_vs_one"] <= ratios["two_processes_vs_one_high"]
    assert ratios["checkpoint_share"] == pytest.approx(0.5 / (0.5 + 200 * 0.2))
    assert ratios["input_share"] == pytest.approx(0.05)
    assert ratios["step_seconds_vs_plan"] > 0
    assert (content["rows"], len(content["runs"]), content["split_target"]) == (rows, 9, [held] * 2)
    assert (ratios["target_memory_tensor2"], ratios["target_memory_shard4"]) == (0.6, 0.6)
    assert run(["scale", "--config", str(file), "--set", "num_processes=3"]) == BAD_INPUT


@pytest.mark.parametrize(
    ("code", "said", "kind", "reason"),
    [
        (1, "error: data.train not found: x\ntorch: ChildFailedError\n", InputError, "not found: x"),  # torchrun's own code
        (1, "Traceback\nRuntimeError: the loss is nan\n", RuntimeError, "the loss is nan"),
    ],
)
def test_a_run_that_ends_otherwise_says_why(path, tmp_path, monkeypatch, code, said, kind, reason):
    monkeypatch.setattr(scale.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code, stdout="", stderr=said))
    with pytest.raises(kind, match=f"a run of 2 processes ended with code .*{reason}"):
        measure(bench(path), load_config(HeadsConfig, path), 2, tmp_path, 0, 0)

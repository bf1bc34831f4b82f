"""The benchmark of served states finds states that differ."""

import pytest

from configs.schema.target import EngineStatesConfig
from configs.schema.training import HeadsConfig
from heads.frozen.loading import load_target
from scripts.lab.bench.states import relative_difference
from scripts.lab.settings import BenchStatesConfig
from tests.support.caches import random_conversations, write_rows
from tests.support.states_server import states_served


def test_states_that_differ_are_found(tmp_path, tiny_run):
    target = {"name": str(tiny_run / "target"), "dtype": "float32", "device": "cpu"}
    write_rows(tmp_path / "train.jsonl", random_conversations([(5, 6), (4, 9)], 64, seed=0))
    config = HeadsConfig.model_validate({"target": target, "data": {"train": str(tmp_path / "train.jsonl")}})
    whole = load_target(config.target)
    with states_served(whole, [1, 2], tmp_path) as served:
        states = EngineStatesConfig(urls=[served.url], path=str(tmp_path))
        recipe = config.model_copy(update={"target": config.target.model_copy(update={"states": states})})
        assert relative_difference(BenchStatesConfig(), recipe) < 1e-6
        served.scale = 1.01
        assert relative_difference(BenchStatesConfig(), recipe) == pytest.approx(0.01, rel=0.01)

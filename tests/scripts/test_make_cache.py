"""`scripts/make_cache.py` on data made by `scripts/make_data.py`."""

import json
from pathlib import Path

import pytest

from configs.runtime.command import DONE, run_command
from configs.schema.data import CacheConfig
from configs.schema.target import TargetConfig
from distill.cache.reader import open_cache
from distill.dataset.conversations import read_conversations
from heads.frozen.loading import load_target
from scripts.make_cache import main


@pytest.fixture
def data(tiny_data):
    """The folder with conversations that the target of `tiny_run` wrote."""
    return Path(tiny_data.output)


def run(tiny_run, data, **settings):
    target = {"target.name": tiny_run / "target", "target.dtype": "float32", "target.device": "cpu"}
    values = {**target, "data": data / "train.jsonl", **settings}
    argv = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    return run_command(CacheConfig, main, description="", argv=argv)


def test_data_become_a_cache_that_opens_for_them_and_their_target(tmp_path, tiny_run, data, capsys):
    assert run(tiny_run, data, output=tmp_path / "made", kind="top_k", k=4) == DONE
    assert "target cache: 13 bytes a token" in capsys.readouterr().err  # 4 log-probabilities, the tail, and 4 ids of 6 bits
    target = load_target(TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"))
    cache = open_cache(tmp_path / "made", data / "train.jsonl", target)
    rows = read_conversations(data / "train.jsonl")
    assert int(cache.places.length_C.sum()) == sum(len(row.answer_ids) for row in rows)
    assert json.loads((tmp_path / "made" / "run.json").read_text())["config"]["k"] == 4

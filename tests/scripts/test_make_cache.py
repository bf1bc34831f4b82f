"""`scripts/make_cache.py` run as a person runs it: as a script, from another folder, on data made by `scripts/make_data.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.runtime.command import BAD_INPUT, run_command
from configs.runtime.files import LOCK_FILE
from configs.schema.data import CacheConfig
from configs.schema.target import TargetConfig
from distill.cache.reader import open_cache
from distill.dataset.conversations import count_answer_tokens, read_conversations
from heads.target.loading import load_target
from scripts.make_cache import main

ENTRY = Path(__file__).resolve().parents[2] / "scripts" / "make_cache.py"


@pytest.fixture
def data(tiny_data):
    """The folder with conversations that the target of `tiny_run` wrote."""
    return Path(tiny_data.output)


def settings_of(tiny_run, data, **settings):
    target = {"target.name": tiny_run / "target", "target.dtype": "float32", "target.device": "cpu"}
    values = target | {"data": data / "train.jsonl"}
    return [part for key, value in {**values, **settings}.items() for part in ("--set", f"{key}={value}")]


def test_data_become_a_cache_that_opens_for_them_and_their_target(tmp_path, tiny_run, data):
    command = [sys.executable, str(ENTRY), *settings_of(tiny_run, data, output="made", kind="top_k", k=4)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "target cache: 13 bytes a token" in done.stderr  # 4 log-probabilities, the tail, and 4 ids of 6 bits
    target = load_target(TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"))
    cache = open_cache(tmp_path / "made", data / "train.jsonl", target)
    rows = read_conversations(data / "train.jsonl")
    assert sum(place.length for place in cache.manifest.conversations) == count_answer_tokens(rows)
    assert json.loads((tmp_path / "made" / "run.json").read_text())["config"]["k"] == 4


def test_more_tokens_than_the_vocabulary_are_one_sentence_and_nothing_is_written(tmp_path, tiny_run, data, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = settings_of(tiny_run, data, output="made", kind="top_k", k=65)
    assert run_command(CacheConfig, main, description="", argv=arguments) == BAD_INPUT
    assert "error: k: expected at most 64, the size of the target's vocabulary, got 65" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "made").iterdir()] == [LOCK_FILE]  # the claim of the folder, and nothing else

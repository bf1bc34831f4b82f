"""Recipes of heads on the tiny target, for the head benchmark."""

import json

import pytest

from configs.runtime.loading import load_config
from configs.schema.training import HeadsConfig
from heads.frozen.loading import load_target
from scripts.lab.head_settings import BenchHeadsConfig

ELSEWHERE = ("a b c a b c a b", "what is that", "say it")


@pytest.fixture(scope="module")
def folder(tiny_data, recipe, tmp_path_factory):
    """A folder with recipes `medusa` and `eagle3` for the tiny target, and their data; only for reading."""
    folder = tmp_path_factory.mktemp("heads")
    (folder / "data.yaml").write_text(json.dumps(tiny_data.model_dump(mode="json")))
    train = recipe["data"]["train"]
    cache = {"target": recipe["target"], "data": train, "taps": [0, 1, 2], "max_length": 64, "output": f"{folder}/cache"}
    (folder / "cache.yaml").write_text(json.dumps(cache))
    (folder / "elsewhere.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ELSEWHERE))
    ungated = {"enabled": False}
    special = {
        "medusa": {"head": {"kind": "medusa", "num_depths": 2}, "sanity": ungated},
        "eagle3": {
            "head": {"kind": "eagle3", "num_depths": 3, "taps": [0, 1, 2], "draft_vocab_size": 32},
            "sanity": ungated,
        },
    }
    for name, own in special.items():
        (folder / f"{name}.yaml").write_text(json.dumps(recipe | own))
    return folder


@pytest.fixture(scope="module")
def make_config(folder, tmp_path_factory):
    """A function that makes the benchmark's config, changed as asked; all share one folder of trained runs."""
    output = tmp_path_factory.mktemp("bench")

    def make(**changes):
        settings = {
            "data": str(folder / "data.yaml"),
            "cache": None,
            "recipes": [str(folder / "medusa.yaml"), str(folder / "eagle3.yaml")],
            "runs": str(output / "runs"),
            "num_prompts": 3,
            "held_out": {"home": []},
            "suites": [{"name": "other", "path": str(folder / "elsewhere.jsonl")}],
            "max_new_tokens": 10,
            "repeats": 1,
            "trees": [],
            "bootstrap_samples": 50,
            "output": str(output / "heads.json"),
        }
        return BenchHeadsConfig.model_validate(settings | changes)

    return make


@pytest.fixture(scope="module")
def target(folder):
    return load_target(load_config(HeadsConfig, folder / "eagle3.yaml").target)

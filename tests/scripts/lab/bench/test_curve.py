"""The data curve on a tiny target: its rows, the law through them, and suffix lookup over the same answers."""

import json
from pathlib import Path

import pytest

from configs.runtime.command import DONE
from configs.runtime.loading import load_config
from configs.schema.decoding import DecodeConfig
from configs.schema.training import HeadsConfig
from distill.dataset.batches import ConversationDataset
from distill.dataset.conversations import read_conversations
from eval.decoder.decode import Request, decode
from heads.proposers.lookup import SuffixLookup
from scripts.lab import trained_runs
from scripts.lab.bench.curve import measure_curve, summarise
from scripts.lab.bench.head_recipes import train_recipes
from scripts.lab.head_settings import BenchCurveConfig, BenchHeadsConfig
from train.launch import run_heads

POINTS = [{"share": 0.5, "epochs": 2}, {"share": 1.0}]


@pytest.fixture
def config(folder, tmp_path):
    return BenchCurveConfig.model_validate(
        {
            "data": str(folder / "data.yaml"),
            "cache": str(folder / "cache.yaml"),
            "recipes": [str(folder / "medusa.yaml"), str(folder / "eagle3.yaml")],
            "points": POINTS,
            "runs": str(tmp_path / "runs"),
            "num_prompts": 3,
            "held_out": {"home": []},
            "suites": [{"name": "other", "path": str(folder / "elsewhere.jsonl")}],
            "max_new_tokens": 10,
            "bootstrap_samples": 50,
            "plot": str(tmp_path / "curve.svg"),
            "output": str(tmp_path / "curve.json"),
        }
    )


def test_a_row_for_each_family_size_and_suite_and_a_law_for_each_family_and_suite(config, target, recipe, monkeypatch):
    trained = []

    def run_training(entry, path):
        trained.append(load_config(HeadsConfig, path))
        return run_heads(trained[-1])

    monkeypatch.setattr(trained_runs, "run_training", run_training)
    assert measure_curve(config) == DONE
    rows = json.loads(Path(config.output).read_text())["rows"]
    measured, laws = ([row for row in rows if row["row"] == kind] for kind in ("measured", "law"))
    conversations = read_conversations(Path(recipe["data"]["train"]))
    half, length = round(len(conversations) / 2), recipe["data"]["max_length"]
    tokens = [ConversationDataset(conversations, length, number).num_labels for number in (half, len(conversations))]
    families = ["eagle3", "medusa", "suffix_lookup", "suffix_lookup + medusa"]
    for suite in ("home", "other"):
        found = sorted((row["family"], row["answer_tokens"]) for row in measured if row["suite"] == suite)
        assert found == [(family, size) for family in families for size in tokens]
        assert sorted(law["family"] for law in laws if law["suite"] == suite) == families
    # The smallest first, all from one cache; those of all conversations are the recipes that the benchmark of heads trains.
    epochs = load_config(HeadsConfig, config.recipes[1]).schedule.epochs
    found = [(each.data.num_conversations, each.schedule.epochs) for each in trained]
    assert found == [(half, 2), (half, 2), (None, epochs), (None, epochs)]
    assert {row["epochs"] for row in measured if row["family"] == "eagle3"} == {2, epochs}
    assert len({each.data.cache for each in trained}) == 1
    shared = {name: getattr(config, name) for name in ("data", "cache", "recipes", "runs")}
    train_recipes(BenchHeadsConfig(**shared, output=config.output))
    assert len(trained) == 4
    dataset = ConversationDataset(conversations, length, half)
    lookup = SuffixLookup(target.device, [conversations[number].answer_ids for number in dataset.numbers])
    at_home = read_conversations(Path(recipe["data"]["held_out"]))[-3:]
    requests = [Request(prompt_id=row.prompt_id, category="", tokens=row.prompt_ids) for row in at_home]
    settings = DecodeConfig(num_speculative_tokens=8, max_new_tokens=10, batch_size=len(requests))
    rounds = [each for done in decode(target, requests, settings, lookup)[0] for each in done.rounds]
    row = next(
        row for row in measured if (row["family"], row["suite"], row["answer_tokens"]) == (families[2], "home", tokens[0])
    )
    assert row["tau"] == pytest.approx(sum(len(each.committed) for each in rounds) / len(rounds))
    assert (row["recipe"], row["epochs"], row["training_seconds"]) == (None, None, None)
    assert "<svg" in Path(config.plot).read_text()


def test_the_law_is_that_of_the_sizes():
    """Tau falls short of 4 by 2 at 100 tokens and by 1 at 400: half of it for four times the tokens."""

    def row(tokens, committed):
        return {
            "family": "hydra",
            "recipe": "hydra",
            "suite": "home",
            "answer_tokens": tokens,
            "epochs": 1,
            "training_seconds": 1.0,
            "most": 4,
            "counts": [[committed, 10], [committed, 10]],
        }

    *rows, law = summarise([row(100, 20), row(400, 30)], samples=20)
    assert law["exponent"] == pytest.approx(0.5)
    assert law["tau_at_4_times"] == pytest.approx(3.5)
    assert [each["less_law"] for each in rows] == [pytest.approx(0, abs=1e-9), pytest.approx(0, abs=1e-9)]
    *rows, law = summarise([row(100, 20), row(200, 20), row(400, 30)], samples=20)
    assert [each["less_law"] > 0 for each in rows] == [True, False, True]
    assert law["last_less_predicted"] == pytest.approx(1.0)  # the first two say that data bring nothing

"""`scripts/advise.py` on the tiny target: from prompts to a page and a recipe that loads, resumed, within its budget."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.runtime.command import BAD_INPUT, DONE, FAILED, run_command
from configs.runtime.loading import load_config
from configs.schema.commands.advising import AdviceConfig
from configs.schema.data import DataConfig
from configs.schema.training import DistillConfig, HeadsConfig
from scripts import advise, steps
from scripts.advice import trained_runs
from scripts.advice.candidates import make_candidates
from scripts.advice.findings import name_engines
from scripts.advice.halving import Rung
from train.launch import run_distillation, run_heads

TRAINING = {"heads.py": (HeadsConfig, run_heads), "distill.py": (DistillConfig, run_distillation)}


@pytest.fixture
def run(tiny_run, recipe, tmp_path, monkeypatch):
    """A function that runs the command, its steps in this process; `run.ran` is which of them were started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    for name, own in (("medusa", {"head": {"kind": "medusa", "num_depths": 3}}), ("small", {"student": {"layers": [0]}})):
        Path(f"{name}.json").write_text(json.dumps(recipe | own))
    ran = []

    def call(arguments):
        name = ".".join(Path(arguments[0]).with_suffix("").parts)
        ran.append(name)
        return run_command(DataConfig, importlib.import_module(name).main, description="", argv=arguments[1:])

    def train(entry, path):
        schema, train_by = TRAINING[entry.name]
        settings = load_config(schema, path)
        ran.append(Path(settings.output).name.rpartition("-")[0])
        return train_by(settings)

    monkeypatch.setattr(steps, "run_step", call)
    monkeypatch.setattr(trained_runs, "run_training", train)

    def start(*arguments, budget="5m", prompts=str(tiny_run / "suite.jsonl"), **settings):
        values = {
            "target": {"dtype": "float32", "device": "cpu"},
            "answers": {"max_new_tokens": 8},
            "held_out_share": 0.4,
            "families": {
                "medusa": {"recipe": "medusa.json", "values": {"head.num_layers": [1]}},
                "draft_lm": {"recipe": "small.json", "values": {"schedule.batch_size": [2]}},
            },
            "draft_vocab_sizes": [16, 1000],
            "max_length": 64,
            "epochs": 1,
            "first_conversations": 4,
            "cost": {"num_speculative_tokens": 3, "batch_sizes": [1, 2], "context_tokens": [24], "repeats": 1},
            "batches_shown": [1, 2],
            "bootstrap_samples": 50,
            "output": "out",
        }
        Path("config.json").write_text(json.dumps(values | settings))
        asked = [] if prompts is None else ["--prompts", prompts]
        argv = [str(tiny_run / "target"), *asked, "--budget", budget, "--config", "config.json", *arguments]
        return run_command(AdviceConfig, advise.main, description="", argv=argv, add_arguments=advise.add_arguments)

    start.ran = ran
    return start


def test_prompts_become_a_page_a_recipe_that_loads_and_a_resumed_run_repeats_nothing(run):
    assert run() == DONE
    found = json.loads(Path("out/advice.json").read_text())
    first = [row for row in found["trials"] if row["conversations"] == 4]
    names = ["medusa, draft_vocab_size 16", "draft_lm, draft_vocab_size 16", "medusa, draft_vocab_size all"]
    assert {row["name"] for row in first} == {*names, "draft_lm, draft_vocab_size all"}
    second = [row for row in found["trials"] if row["conversations"] > 4]
    assert {row["name"] for row in second} == {row["name"] for row in first[:2]}
    assert first == sorted(first, key=lambda row: -row["predicted_speedup"])
    best = second[0]
    assert found["advice"]["family"] == best["family"]
    assert found["advice"]["num_speculative_tokens"] == best["num_speculative_tokens"]
    assert found["advice"]["predicted_speedup_of_whole_training"] == found["advice"]["predicted_speedup"]  # it saw all
    assert found["spent_seconds"] < found["budget_seconds"] == 300
    assert found["data_curve"]["check"] is None
    assert len(found["data_curve"]["measured"]) == 2
    page = Path("out/advice.md").read_text()
    kind = found["advice"]["family"]
    assert found["advice"]["sentences"]["Engines"].startswith(f"{kind} is exported for ")
    assert all(f"**{question}**" in page for question in found["advice"]["sentences"])
    schema = DistillConfig if found["advice"]["family"] == "draft_lm" else HeadsConfig
    recipe = load_config(schema, "out/recipe.yaml")
    assert recipe.num_speculative_tokens == found["advice"]["num_speculative_tokens"]
    assert Path(recipe.data.train).is_file()
    assert recipe.schedule.max_steps == 3  # the whole recipe's own, not the trial's

    ran = list(run.ran)
    assert ran[:2] == ["scripts.data", "scripts.data"]
    assert len(ran) == 2 + 4 + 2
    assert run() == DONE
    assert run.ran == ran
    assert json.loads(Path("out/advice.json").read_text())["trials"] == found["trials"]


def test_of_data_that_are_there_a_candidate_that_cannot_be_trained_is_named_and_others_go_on(run, tiny_data, monkeypatch):
    train = trained_runs.run_training
    monkeypatch.setattr(
        trained_runs, "run_training", lambda entry, path: BAD_INPUT if entry.name == "heads.py" else train(entry, path)
    )
    assert run(prompts=None, data=tiny_data.output, draft_vocab_sizes=[16]) == DONE
    assert "scripts.data" not in run.ran
    found = json.loads(Path("out/advice.json").read_text())
    assert {row["family"] for row in found["trials"]} == {"draft_lm"}
    assert "failed: medusa, draft_vocab_size 16" in Path("out/advice.md").read_text()


def test_of_a_draft_that_no_engine_takes_the_advice_names_the_best_that_one_does():
    hydra, eagle3 = (SimpleNamespace(kind=kind, name=f"{kind}, small") for kind in ("hydra", "eagle3"))
    first = Rung(size=4, ranked=[(hydra, 2.0), (eagle3, 1.5)], failed=[], not_begun=[])
    last = Rung(size=8, ranked=[(hydra, 2.1)], failed=[], not_begun=[])
    assert "none takes hydra" in (said := name_engines(hydra, [first, last]))
    assert "eagle3, small came furthest" in said
    assert name_engines(eagle3, [first]).startswith("eagle3 is exported for vllm, ")


def test_a_budget_that_is_spent_begins_no_trial(run, capsys):
    assert run(budget="0.001s") == FAILED
    assert run.ran == ["scripts.data"]  # there is no time for more answers than the first
    assert "raise --budget" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"budget": "soon"}, "--budget must be a time above 0 such as 90s, 30m or 1.5h, got soon"),
        ({"prompts": "nowhere.jsonl"}, "prompts not found: nowhere.jsonl"),
        ({"prompts": None}, "give either --prompts, a file of what the target will be asked, or data"),
        ({"families": {}}, "families is empty"),
        (
            {"engine": "sglang", "families": {"medusa": {"recipe": "medusa.json"}}},
            "engine: sglang takes draft_lm, eagle3, dflash, domino, and the families are of kind medusa; add one to families",
        ),
        ({"families": {"medusa": {"recipe": "medusa.json", "values": {"head.depth": [1]}}}}, "families.medusa.values"),
    ],
)
def test_bad_inputs_are_one_sentence(run, capsys, settings, said):
    assert run(**settings) == BAD_INPUT
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line


def test_the_default_families_are_trials_of_recipes_that_load(tmp_path):
    names = [each.name for each in make_candidates(AdviceConfig(), tmp_path, vocab_size=49_152)]
    assert len(names) == len(set(names)) == 10
    assert "draft_lm, layers [0, 1], draft_vocab_size 4096" in names

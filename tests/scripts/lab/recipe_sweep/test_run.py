"""The sweep: cells and their recipes, what is kept, and a whole one on a tiny target."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.runtime.command import BAD_INPUT, DONE, GATE_FAILED
from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import CHECKOUT
from configs.runtime.loading import load_config
from configs.schema.target import TargetConfig
from configs.schema.training import DistillConfig
from distill.dataset.conversations import read_conversations
from eval.decoder.decode import generate
from heads.artifact import load_draft
from heads.frozen.loading import load_target
from scripts.lab.bench import trained_runs
from scripts.lab.bench.harness import measured_rows
from scripts.lab.bench.trained_runs import train_run
from scripts.lab.recipe_sweep import run as recipe_sweep
from scripts.lab.recipe_sweep.cells import load_recipe, make_cells
from scripts.lab.recipe_sweep.results import read_rows
from scripts.lab.recipe_sweep.run import Measuring
from scripts.lab.recipe_sweep.settings import SweepConfig
from train.launch import run_distillation

DRAFTS = {"phases": [{"draft_states": 0.5}]}


@pytest.fixture(scope="module")
def data(tiny_data):
    """The folder with train.jsonl and held_out.jsonl."""
    return Path(tiny_data.output)


@pytest.fixture
def sweep(tmp_path, recipe):
    """A function that makes the config of a sweep over two cells, changed as asked."""
    own = {"student": {"layers": [0]}, "loss": {"mix": {"reverse_kl": 2.0}, "divergence": None}}
    schedule = {**recipe["schedule"], "batch_size": 4, "max_steps": None}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe | own | {"schedule": schedule}))

    def make(**changes):
        settings = {
            "distill": str(tmp_path / "recipe.yaml"),
            "settings": {"schedule.max_steps": 3},
            "divergences": {"kl": {"divergence": "forward_kl"}, "mixed": {"mix": {"jsd": 1.0, "total_variation": 0.5}}},
            "num_prompts": 3,
            "max_new_tokens": 8,
            "batch_size": 2,
            "bootstrap_samples": 50,
            "output": str(tmp_path / "sweep"),
        }
        return SweepConfig.model_validate(settings | changes)

    return make


@pytest.fixture
def trained(monkeypatch):
    """The recipes trained by the sweep, in this process: one of its own costs seconds of imports."""
    recipes = []

    def run_training(entry, path):
        recipes.append(load_config(DistillConfig, path))
        return run_distillation(recipes[-1])

    monkeypatch.setattr(trained_runs, "run_training", run_training)
    return recipes


# --- cells --------------------------------------------------------------------------------------------------------


def test_a_cell_is_the_shared_recipe_but_for_its_divergence_and_its_policy(sweep, data, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_bytes((data / "train.jsonl").read_bytes())
    config = sweep(
        policies={"own": {}, "drafts": DRAFTS | {"temperature": 0.5}, "theirs": {"train": str(other)}}, cells="cross"
    )
    undistilled, cells = make_cells(config)
    assert [cell.name for cell in cells] == [f"{first} on {second}" for first, second in config.pairs]
    for cell, (divergence, policy) in zip(cells, config.pairs, strict=True):
        assert cell.recipe.loss == config.divergences[divergence]  # nothing of the recipe's own mix is left in it
        assert cell.recipe.policy.model_dump() == config.policies[policy].model_dump(exclude={"train"})
        assert cell.recipe.data.train == str(other if policy == "theirs" else data / "train.jsonl")
        assert not cell.recipe.schedule.resume
        same = {"loss", "policy", "data", "output", "schedule"}
        assert cell.recipe.model_dump(exclude=same) == undistilled.recipe.model_dump(exclude=same)
        assert cell.recipe.schedule.max_steps == 3
    assert len({cell.folder for cell in [undistilled, *cells]}) == 7


def test_a_cell_keeps_its_folder_until_something_changes_that_decides_its_weights(sweep, data, tmp_path):
    def folder(**changes):
        return make_cells(sweep(**changes))[1][0].folder

    assert folder() == folder(max_new_tokens=4, num_prompts=1, temperatures=[0.0], policies={"target_answers": {}, "b": DRAFTS})
    assert folder() != folder(settings={"schedule.max_steps": 4})
    assert folder() != folder(divergences={"kl": {"divergence": "forward_kl", "temperature": 2.0}})
    copy = tmp_path / "train.jsonl"
    copy.write_bytes((data / "train.jsonl").read_bytes())
    before = folder(settings={"data.train": str(copy)})
    copy.write_bytes(b"".join(copy.read_bytes().splitlines(keepends=True)[1:]))
    assert folder(settings={"data.train": str(copy)}) != before


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"settings": {"schedule.max_stepz": 3}}, r"^settings\.schedule\.max_stepz: unknown key .*'schedule\.max_steps'"),
        (
            {"divergences": {"kl": {}, "labels": {"divergence": "cross_entropy"}}, "policies": {"drafts": DRAFTS}},
            "^cell labels on drafts: a phase of policy",
        ),
    ],
)
def test_what_does_not_go_together_is_named(sweep, changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_cells(sweep(**changes))


@pytest.mark.parametrize(("code", "error"), [(0, None), (BAD_INPUT, InputError), (GATE_FAILED, RuntimeError)])
def test_a_cell_is_trained_by_the_entry_in_a_process_of_its_own_and_one_that_fails_is_named(sweep, monkeypatch, code, error):
    commands = []

    def run(command, check):
        commands.append(command)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(trained_runs.subprocess, "run", run)
    _, (cell, _) = make_cells(sweep())
    (cell.folder / "checkpoints").mkdir(parents=True)
    if error is None:
        train_run(cell, "cell")
    else:
        with pytest.raises(error, match=rf"^cell kl on target_answers: its training .* ended with code {code}"):
            train_run(cell, "cell")
    assert (cell.folder / "checkpoints").exists() == (error is not None)
    assert commands == [[sys.executable, str(CHECKOUT / "train/distill.py"), "--config", str(cell.folder / "recipe.json")]]
    assert load_config(DistillConfig, cell.folder / "recipe.json") == cell.recipe


# --- the whole of it ----------------------------------------------------------------------------------------------


def test_a_sweep_trains_decodes_compares_and_keeps_what_it_has(sweep, trained, data, tmp_path, capsys, monkeypatch):
    assert recipe_sweep.run_sweep(sweep()) == DONE
    path = tmp_path / "sweep/sweep.json"
    content = json.loads(path.read_text())
    rows = read_rows(path)
    assert [(row["divergence"], row["data_policy"]) for row in rows] == [
        ("kl", "target_answers"),
        ("mixed", "target_answers"),
        ("undistilled", None),
    ]
    for row in rows:
        for name in ("tau_t0", "tau_t1", "tau_t0_vs_first", "tau_t1_vs_first"):
            assert 0 < row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
    assert rows[0]["tau_t0_vs_first"] == 1.0
    assert [row["labels"] for row in rows] == [rows[0]["labels"], rows[0]["labels"], 0]  # the same batches in both cells
    assert 3 * 4 <= rows[0]["labels"] <= 3 * 4 * 8
    assert rows[0]["training_seconds"] > 0
    assert content["verdict"]["winner"] in ("kl on target_answers", "mixed on target_answers")
    assert content["command"].startswith("python scripts/lab/sweep.py")
    printed = capsys.readouterr().out
    assert "| divergence | data_policy | tau_t0 |" in printed
    assert "<!--" not in printed
    assert printed.rstrip().endswith(content["verdict"]["sentence"])

    # The same again: nothing is trained or decoded. Other answers: all is decoded anew. Another divergence: that is trained.
    assert [recipe.loss.weights for recipe in trained] == [{"forward_kl": 1.0}, {"jsd": 1.0, "total_variation": 0.5}]
    with monkeypatch.context() as closed:
        closed.setattr(recipe_sweep, "load_target", None)
        assert recipe_sweep.run_sweep(sweep()) == DONE
    assert read_rows(path) == rows
    recipe_sweep.run_sweep(sweep(max_new_tokens=5))
    assert len(trained) == 2
    assert read_rows(path)[0]["tau_t0"] != rows[0]["tau_t0"]
    recipe_sweep.run_sweep(sweep(divergences={"kl": {"divergence": "forward_kl"}, "tv": {"divergence": "total_variation"}}))
    assert [recipe.loss.weights for recipe in trained[2:]] == [{"total_variation": 1.0}]


def test_tau_is_of_the_cells_draft_on_prompts_that_did_not_choose_it(sweep, trained, data, tiny_run):
    config = sweep(num_prompts=2)
    undistilled, (cell, _) = make_cells(config)
    train_run(cell, "cell")
    measuring = Measuring(config, load_recipe(config))
    rows = read_conversations(data / "held_out.jsonl")
    assert measuring.rows == rows[-2:]
    result, before = measuring.result(cell), measuring.result(undistilled)
    target = load_target(TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"))
    draft = load_draft(cell.artifact, target.identity, target.model)
    answers = generate(target, [row.prompt_ids for row in rows[-2:]], measuring.settings[0.0], draft.proposer)
    assert [committed for committed, _ in result.counts[0.0]] == [len(answer) - 1 for answer in answers]
    assert [committed for committed, _ in before.counts[0.0]] == [len(answer) - 1 for answer in answers]  # lossless, both
    assert before.counts != result.counts
    assert (before.training_seconds, before.labels) == (0.0, 0)


def test_turns_of_a_prompt_are_one_cluster_and_stay_on_one_side(sweep, data, tmp_path):
    rows = [json.loads(line) for line in (data / "held_out.jsonl").read_text().splitlines()]
    names = ["a", "a", "b", "c", "c"]
    turns = [row | {"prompt_id": name, "turn": number} for number, (row, name) in enumerate(zip(rows, names, strict=False))]
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in turns))
    config = sweep(num_prompts=2, settings={"data.held_out": str(path)})
    measuring = Measuring(config, load_recipe(config))
    assert [(row.prompt_id, row.turn) for row in measuring.rows] == [("b", 2), ("c", 3), ("c", 4)]
    assert measuring._by_prompt({"b/2": [3, 1], "c/3": [4, 2], "c/4": [8, 5]}) == {"b": [3, 1], "c": [12, 7]}
    with pytest.raises(InputError, match=r"has 2 prompts beside the 1 that choose checkpoints, got 3; ask for fewer"):
        measured_rows(path, 3, 1)
    sources = ["x/a", "x/b", "y/c", "y/d", "y/e"]
    path.write_text("".join(json.dumps(row | {"prompt_id": name}) + "\n" for row, name in zip(rows, sources, strict=False)))
    assert [row.prompt_id for row in measured_rows(path, 2, 1, ["y", "x"])] == ["x/b", "y/e"]
    with pytest.raises(InputError, match=r"has 1 prompts of source x beside the 1 that choose checkpoints, got 2"):
        measured_rows(path, 4, 1, ["y", "x"])

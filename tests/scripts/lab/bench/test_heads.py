"""The head benchmark on a tiny target: what its rows say, and what is kept."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from configs.runtime.command import DONE
from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import CHECKOUT
from configs.runtime.loading import load_config
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import StaticTree
from configs.schema.training import HeadsConfig
from distill.dataset.conversations import read_conversations
from eval.decoder.decode import Request, decode
from heads.artifact import load_draft
from heads.proposers.lookup import PromptLookup, SuffixLookup
from heads.proposers.merged import LookupFirst
from heads.proposers.protocol import LearningProposer
from scripts.lab import trained_runs
from scripts.lab.bench import head_recipes, heads
from scripts.lab.bench.head_recipes import make_cache, make_data, with_cache
from scripts.lab.bench.heads import compare_heads
from tests.scripts.lab.bench.conftest import ELSEWHERE
from train.launch import run_heads


@pytest.fixture(scope="module")
def results(make_config):
    """What the benchmark wrote, its heads trained in this process."""
    config = make_config()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_runs, "run_training", lambda entry, path: run_heads(load_config(HeadsConfig, path)))
        assert compare_heads(config) == DONE
    return json.loads(Path(config.output).read_text())


# --- rows ---------------------------------------------------------------------------------------------------------


def test_every_draft_has_a_row_for_each_suite_alone_and_after_a_lookup(results, target, recipe):
    rows = results["rows"]
    pairs = [pair for kind in ("medusa", "eagle3") for pair in ((kind, kind), (f"suffix_lookup + {kind}", kind))]
    for suite, count in (("home", 3), ("other", len(ELSEWHERE))):
        of_suite = [row for row in rows if row["suite"] == suite]
        assert [(row["family"], row["recipe"]) for row in of_suite] == [
            *pairs,
            ("prompt_lookup", None),
            ("suffix_lookup", None),
        ]
        assert {row["prompts"] for row in of_suite} == {count}
    assert len({tuple(row) for row in rows}) == 1  # the same columns, for one table
    assert (results["name"], results["ratios"]) == ("heads", {})
    at_home = [row.prompt_ids for row in read_conversations(Path(recipe["data"]["held_out"]))[-3:]]
    elsewhere = [target.encode_chat([{"role": "user", "content": text}]) for text in ELSEWHERE]
    drafts = [load_draft(run["artifact"], target.identity, target.model).proposer for run in results["runs"]]
    known = [row.answer_ids for row in read_conversations(Path(recipe["data"]["train"]))]

    def proposers():
        for draft in drafts:
            yield draft
            yield LookupFirst(SuffixLookup(target.device, known, min_expected=2.25), draft, target.vocab_size, num_drafts=2)
        yield from (PromptLookup(target.device), SuffixLookup(target.device, known))

    found = {"home": list(at_home), "other": elsewhere}
    rows_of = sorted(rows, key=lambda row: row["suite"] == "other")
    for proposer, row in zip([*proposers(), *proposers()], rows_of, strict=True):
        requests = [Request(prompt_id=str(ids), category="", tokens=tuple(ids)) for ids in found[row["suite"]]]
        length = 8 if isinstance(proposer, LookupFirst | SuffixLookup) else 2
        settings, rounds = DecodeConfig(num_speculative_tokens=length, max_new_tokens=10), []
        for request in requests:
            answer = decode(target, [request], settings, proposer)[0][0]
            rounds += answer.rounds
            if isinstance(proposer, LearningProposer):  # beside a head as alone, from the prompts of the suite before
                proposer.learn(answer.tokens)
        assert row["tau"] == pytest.approx(sum(len(round_.committed) for round_ in rounds) / len(rounds))
        first = [round_.num_accepted > 0 for round_ in rounds if round_.drafted]
        assert row["alpha_by_position"].split(" / ")[0] == (f"{sum(first) / len(first):.2f}" if first else "–")
        assert row["tau_low"] <= row["tau"] <= row["tau_high"]
        assert 0 < row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert (row["num_speculative_tokens"], row["lossless"]) == (length, "lossless")


def test_trees_are_measured_beside_chains(results, make_config, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(trained_runs, "run_training", None)
    monkeypatch.setattr(heads, "TREE", StaticTree(kind="static", branching=[2, 1]))
    only = {"recipes": [str(folder / "eagle3.yaml")], "trees": ["eagle3"], "max_new_tokens": 24}
    assert compare_heads(make_config(**only, output=str(tmp_path / "heads.json"))) == DONE
    fixed, with_lookup, by_tree = json.loads((tmp_path / "heads.json").read_text())["rows"][:3]
    assert by_tree["recipe"] == "eagle3, static tree"
    pairs = [(with_lookup, fixed)]
    assert all((one["recipe"], one["lossless"]) == (other["recipe"], other["lossless"]) for one, other in pairs)
    assert {one["family"] for one, _ in pairs} == {"suffix_lookup + eagle3"}
    assert by_tree["tau"] > fixed["tau"]


def test_each_side_of_each_suite_has_a_lookup_that_learns_for_it_alone(results, make_config, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(trained_runs, "run_training", None)
    monkeypatch.setattr(heads, "TREE", StaticTree(kind="static", branching=[2, 1]))
    lookups, plain = [], heads.measure

    def measure(target, requests, config, proposers, **others):
        lookups.extend(each.lookup for each in proposers.values() if isinstance(each, LookupFirst))
        return plain(target, requests, config, proposers, **others)

    monkeypatch.setattr(heads, "measure", measure)
    only = {"recipes": [str(folder / "eagle3.yaml")], "trees": ["eagle3"], "baselines": []}
    assert compare_heads(make_config(**only, output=str(tmp_path / "heads.json"))) == DONE
    assert len(set(lookups)) == len(lookups) == 2  # on two suites


def test_chains_and_trees_are_measured_at_a_temperature_and_in_another_template(
    results, make_config, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(trained_runs, "run_training", None)
    only = {
        "recipes": [str(folder / "eagle3.yaml")],
        "trees": ["eagle3"],
        "temperature": 1.0,
        "templates": {"bare": "{{ messages[0]['content'] }}"},
        "baselines": ["suffix_lookup"],
    }
    assert compare_heads(make_config(**only, output=str(tmp_path / "heads.json"))) == DONE
    rows = json.loads((tmp_path / "heads.json").read_text())["rows"]
    assert {row["suite"] for row in rows} == {"home", "bare", "other"}
    assert {row["lossless"] for row in rows} <= {"lossless", "inconclusive"}  # three prompts show little of a distribution
    assert {(row["family"], row["recipe"]) for row in rows} == {
        ("eagle3", "eagle3"),
        ("suffix_lookup + eagle3", "eagle3"),
        ("eagle3", "eagle3, static tree"),
        ("suffix_lookup", None),
    }


def test_a_run_that_was_cut_off_finds_what_it_had_measured(results, make_config, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(trained_runs, "run_training", None)
    measured, whole = [], heads.measure_run

    def measure_run(config, target, requests, run, *others, suite):
        if cut_off and measured:
            raise KeyboardInterrupt
        measured.append((run.name, suite))
        return whole(config, target, requests, run, *others, suite=suite)

    monkeypatch.setattr(heads, "measure_run", measure_run)
    only = {"recipes": [str(folder / "eagle3.yaml")], "output": str(tmp_path / "heads.json")}
    cut_off = True
    with pytest.raises(KeyboardInterrupt):
        compare_heads(make_config(**only))
    cut_off = False
    assert compare_heads(make_config(**only)) == DONE
    assert measured == [("eagle3", "home"), ("eagle3", "other")]
    assert len(json.loads((tmp_path / "heads.json").read_text())["rows"]) == 8


def test_costs_are_those_of_the_artifact_the_data_and_the_run(results, recipe):
    answer_tokens = sum(len(row.answer_ids) for row in read_conversations(Path(recipe["data"]["train"])))
    frozen = {"medusa": 0, "eagle3": 32 * 32}  # rows of the output head in the artifact
    at_home = [row for row in results["rows"] if row["suite"] == "home"]
    trained, lookup = [row for row in at_home if row["family"] == row["recipe"]], at_home[-1]
    for run, row in zip(results["runs"], trained, strict=True):
        tensors = load_file(f"{run['artifact']}/model.safetensors")
        assert row["parameters"] == sum(tensor.numel() for tensor in tensors.values())
        assert row["trained_parameters"] == row["parameters"] - frozen[row["family"]]
        assert row["answer_tokens"] == answer_tokens
        assert 3 * 3 <= row["labels"] <= 3 * 3 * 8
        assert 0 < row["training_seconds"] < row["run_seconds"]
    assert (lookup["parameters"], lookup["training_seconds"], lookup["answer_tokens"]) == (0, 0, 0)


def test_finished_runs_are_kept(results, make_config, folder, monkeypatch):
    monkeypatch.setattr(trained_runs, "run_training", None)
    output = str(folder / "again.json")
    assert compare_heads(make_config(output=output)) == DONE
    again = json.loads(Path(output).read_text())
    assert [row["tau"] for row in again["rows"]] == [row["tau"] for row in results["rows"]]
    assert again["runs"] == results["runs"]


# --- what is refused, and what is made -----------------------------------------------------------------------------


def test_data_and_cache_are_made_once_by_their_commands(make_config, folder, tmp_path, monkeypatch):
    made = {"data": tmp_path / "data", "cache": tmp_path / "cache"}
    commands = []

    def run(command, check):
        commands.append(command[1:])
        folder = made[Path(command[1]).stem]
        folder.mkdir(exist_ok=True)
        (folder / "manifest.json").write_text(json.dumps({"config": json.loads(Path(command[3]).read_text())}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(head_recipes.subprocess, "run", run)
    files = {}
    for kind, place in made.items():
        values = json.loads((folder / f"{kind}.yaml").read_text()) | {"output": str(place)}
        files[kind] = tmp_path / f"my_{kind}.yaml"
        files[kind].write_text(json.dumps(values))
    config = make_config(data=str(files["data"]), cache=str(files["cache"]), runs=str(tmp_path))
    for _ in range(2):
        make_data(config)
        make_cache(config)
    assert commands == [[str(CHECKOUT / "scripts" / f"{kind}.py"), "--config", str(file)] for kind, file in files.items()]
    head = load_config(HeadsConfig, folder / "eagle3.yaml")
    assert with_cache(head, config.cache).data.cache == str(made["cache"])
    values = json.loads(files["data"].read_text())
    files["data"].write_text(json.dumps(values | {"held_out_share": 0.3}))
    with pytest.raises(InputError, match="was made by another config than"):
        make_data(config)


def test_recipes_that_make_no_table_are_refused(make_config, folder, tmp_path):
    recipe = json.loads((folder / "medusa.yaml").read_text())
    recipe["data"]["held_out"] = recipe["data"]["train"]
    (tmp_path / "eagle3.yaml").write_text(json.dumps(recipe))
    with pytest.raises(ConfigError, match="recipes: two are called eagle3; give each a file name of its own"):
        compare_heads(make_config(recipes=[str(folder / "eagle3.yaml"), str(tmp_path / "eagle3.yaml")]))
    with pytest.raises(ConfigError, match=r"recipes: all must have the same data\.held_out, got"):
        compare_heads(make_config(recipes=[str(folder / "medusa.yaml"), str(tmp_path / "eagle3.yaml")]))

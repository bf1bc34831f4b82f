"""The models' check: its results follow what a family does, and a process that hangs or dies costs one row."""

import json

import pytest
import torch

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.errors import InputError
from heads.frozen.loading import load_target
from heads.inference.runner import TransformersForward
from scripts.lab.models_check import runner, stages
from scripts.lab.models_check.architectures import family_of, names, not_a_decoder
from scripts.lab.models_check.cases import open_case
from scripts.lab.models_check.runner import check_models, run_stages
from scripts.lab.models_check.stages import STAGES
from scripts.lab.models_check.workers import check_all
from scripts.lab.settings import ModelsCheckConfig
from tests.support.planted_families import check_planted

DECODING = {"plain", "chain", "batch", "tree", "sampled"}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Check stand-ins for families; returns the exit code, the results' file and the document."""
    monkeypatch.setattr(runner, "check_family", check_planted)
    document = tmp_path / "models.md"
    document.write_text("Before.\n\n<!-- table: models -->\n<!-- end -->\n")

    def check(*chosen, seconds=30):
        monkeypatch.setattr(runner, "names", lambda: list(chosen))
        config = ModelsCheckConfig(workers=2, seconds=seconds, output=str(tmp_path / "models.json"), document=str(document))
        return check_models(config), json.loads((tmp_path / "models.json").read_text()), document.read_text()

    return check


def results_of(name, tmp_path):
    case, found = open_case(name, tmp_path), {}
    run_stages(case, lambda outcome: found.update({outcome.stage: outcome}))
    return found


def test_refusals_are_a_result_and_go_into_the_table(run):
    code, results, document = run("passes", "refused", "encoder")
    assert code == DONE
    assert results["not_built"] == {"encoder": "an encoder"}
    passes, refused = results["rows"]
    assert (passes["chain"], passes["mtp"], passes["reason"]) == ("ok", None, None)
    assert (refused["batch"], refused["tree"]) == ("refused", "refused")
    assert refused["reason"] == "batch, tree: set decode.batch_size to 1"
    assert "2 architectures built, 1 names not (" in document
    assert "| refused | ok |" in document


def test_a_part_of_the_check_does_not_replace_the_published_whole():
    for part in ({"names": ["llama"]}, {"stages": ["load"]}):
        with pytest.raises(InputError, match=r"output: docs/results/models\.json is for all names and stages"):
            check_models(ModelsCheckConfig(**part))


def test_wrong_tokens_fail_the_check(run):
    code, results, _ = run("passes", "wrong")
    assert code == GATE_FAILED
    assert results["findings"] == [
        {"architecture": "wrong", "stage": "chain", "result": "wrong", "sentence": "answer 0 departs"}
    ]


def test_a_family_whose_process_dies_or_hangs_costs_its_own_row_only():
    dies, after, hangs, last = check_all(["dies", "passes", "hangs", "passes"], check_planted, num_workers=1, seconds=1)
    assert dies[-1] == ("chain", "error", "the process ended with code 11")
    assert hangs[-1] == ("chain", "error", "no end after 1 seconds")
    assert after == last
    assert [outcome.result for outcome in last] == ["ok", "ok", "skipped"]


def test_a_family_that_is_right_passes_every_stage_that_is_for_it(tmp_path):
    expected = dict.fromkeys(STAGES, "ok") | {"media": "skipped"}
    assert {stage: outcome.result for stage, outcome in results_of("qwen3", tmp_path).items()} == expected


def test_a_forward_that_goes_wrong_after_some_tokens_is_found_by_every_way_of_decoding(tmp_path, monkeypatch):
    right = TransformersForward.hidden

    def hidden(self, ids_BT, positions_BT, masks, cache):
        return right(self, ids_BT, positions_BT + (positions_BT >= 20), masks, cache)

    monkeypatch.setattr(TransformersForward, "hidden", hidden)  # beyond the probes' tokens
    found = results_of("smollm3", tmp_path)
    assert {stage for stage, outcome in found.items() if outcome.result == "wrong"} == {*DECODING, "artifact"}
    assert "departs from transformers' generate" in found["chain"].sentence


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_target_that_is_cast_after_loading_is_found(name, tmp_path, monkeypatch):
    def load_cast(config):
        target = load_target(config)
        torch.nn.Module.to(target.model, dtype=target.model.dtype)
        return target

    monkeypatch.setattr(stages, "load_target", load_cast)
    outcomes = {}
    run_stages(open_case(name, tmp_path), lambda outcome: outcomes.update({outcome.stage: outcome}), ["same_as_transformers"])
    assert outcomes.keys() == {"load", "same_as_transformers"}
    assert outcomes["same_as_transformers"].result == "wrong"


def test_a_parameter_without_a_gradient_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "STEPS", 1)
    weight = torch.nn.Linear(2, 2)
    with pytest.raises(stages.Mismatch, match="1 parameters get no gradient, bias among them"):
        stages.train(weight, lambda: weight.weight.sum(), ["weight", "bias"])
    with pytest.raises(stages.Mismatch, match="the gradient of weight is not finite"):
        stages.train(weight, lambda: (weight.weight * float("nan")).sum(), ["weight"])


def test_what_stands_in_the_mapping_is_told_from_encoders_by_what_transformers_says_of_it():
    asked = ("bert", "whisper", "gpt_neox", "mamba", "mistral3", "qwen2_audio")
    assert {"bert", "mistral3", "phi3, longrope"} <= set(names())
    kinds = {name: not_a_decoder(family_of(name)) for name in asked}
    assert kinds["bert"].startswith("an encoder")
    assert kinds["whisper"].startswith("the decoder half")
    assert kinds["gpt_neox"] is kinds["mamba"] is kinds["mistral3"] is kinds["qwen2_audio"] is None

"""From decoding to the gate's exit code: what is sound passes, and each planted fault is caught by the check meant for it."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from configs.runtime.command import DONE, GATE_FAILED
from configs.schema.evaluation import GateConfig, GateRule, LosslessConfig
from eval.decoder.chain_rules import ChainVerification
from eval.evaluation import evaluate
from eval.gate import main
from tests.support.evaluations import report_in, tiny_evaluation

TAU = "acceptance.tokens_per_target_step"


@pytest.fixture(autouse=True)
def _no_page(monkeypatch):
    """Drawing the page takes longer than all the rest, and is tested elsewhere."""
    monkeypatch.setattr("eval.evaluation.render_html", lambda report: "")


@pytest.fixture
def config(tiny_run, tmp_path):
    decode = {"max_new_tokens": 10, "batch_size": 4}
    lossless = LosslessConfig(first_token_samples=0)
    return tiny_evaluation(
        tiny_run,
        tmp_path / "evaluation",
        num_prompts=5,
        decode=decode,
        baselines=[],
        lossless=lossless,
        bootstrap_samples=200,
    )


def gate(config, *, baseline=None, artifact=None, **settings):
    """Judge the report that an evaluation wrote; return the exit code and the checks that did not pass, with their reasons."""
    folder = Path(config.output)
    arguments = argparse.Namespace(
        report=str(folder / "report.json"), baseline=baseline, artifact=[] if artifact is None else [artifact], output=None
    )
    code = main(GateConfig(**settings), arguments)
    findings = json.loads((folder / "gate.json").read_text())["findings"]
    return code, {each["check"]: each["reason"] for each in findings if each["outcome"] != "pass"}


def accept_everything(target_tokens_BK, tokens_BG, num_drafted_B):
    return ChainVerification(num_drafted_B, target_tokens_BK.gather(1, num_drafted_B.unsqueeze(1)).squeeze(1))


def test_a_sound_draft_passes_and_its_artifact_is_the_one_measured(config):
    evaluate(config)
    assert gate(config, artifact=config.draft, rules=[GateRule(metric=TAU, min=1.05, bound="point")]) == (DONE, {})


def test_a_greedy_rule_that_accepts_everything_flips_the_verdict(config, monkeypatch):
    monkeypatch.setattr("eval.decoder.verifier.verify_greedy", accept_everything)
    evaluate(config)
    code, found = gate(config)
    assert report_in(config).lossless.verdict == "not_lossless"
    assert (code, list(found)) == (GATE_FAILED, ["lossless"])


def test_a_draft_of_another_target_is_caught_by_provenance(config, tmp_path):
    folder = Path(shutil.copytree(config.target.name, tmp_path / "target"))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)
    model.save_pretrained(folder)
    other = config.target.model_copy(update={"name": str(folder)})
    config = config.model_copy(update={"target": other, "allow_target_mismatch": True})
    evaluate(config)
    code, found = gate(config, artifact=config.draft)
    assert (code, list(found)) == (GATE_FAILED, ["provenance"])
    assert "other target weights" in found["provenance"]

"""Drawn acceptance comes at the rates asked for, costs what judging costs, and leaves a report that no gate takes."""

import argparse
import json
from functools import partial

import pytest

from configs.runtime.command import DONE, GATE_FAILED
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import StaticTree
from configs.schema.evaluation import EvalConfig, GateConfig, LosslessConfig, SuiteConfig
from configs.schema.target import TargetConfig
from eval.decoder.batch import BatchRun
from eval.decoder.decode import Request, decode
from eval.decoder.verifier import SimulatedVerifier
from eval.evaluation import evaluate
from eval.gate import main
from eval.report.schema import load_report
from heads.proposers.draft_lm import DraftLM


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_stay_at_the_rates_asked_for(temperature, tiny_llama, as_target):
    target, draft = as_target(tiny_llama(seed=1)), DraftLM(tiny_llama(seed=2), 64)
    requests = [Request(prompt_id=f"p{n}", category="c", tokens=(7, n)) for n in range(40)]
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=60, temperature=temperature)
    simulated = partial(BatchRun, make_verifier=partial(SimulatedVerifier, rates=[0.8, 0.5]))
    generations, _ = decode(target, requests, config, draft, make_run=simulated)
    rounds = [each for generation in generations for each in generation.rounds if len(each.drafted) == 3]
    for place, rate in enumerate([0.8, 0.5, 0.5]):
        reached = [each.num_accepted for each in rounds if each.num_accepted >= place]
        assert sum(each > place for each in reached) / len(reached) == pytest.approx(rate, abs=5 * (rate / len(reached)) ** 0.5)
        assert len(reached) > 100


def test_its_report_says_so_and_no_gate_takes_it(tiny_run, tmp_path):
    config = EvalConfig(
        target=TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"),
        draft=str(tiny_run / "artifact"),
        suite=SuiteConfig(path=str(tiny_run / "suite.jsonl"), num_prompts=4),
        decode=DecodeConfig(num_speculative_tokens=2, max_new_tokens=10),
        repeats=1,
        lossless=LosslessConfig(check_float32_prompts=0),
        simulate_acceptance=[1.0],
        output=str(tmp_path / "out"),
    )
    assert evaluate(config) == DONE
    report = load_report(tmp_path / "out" / "report.json")
    assert report.simulated
    assert report.acceptance.position_conditional == [1.0, 1.0]
    arguments = argparse.Namespace(report=str(tmp_path / "out" / "report.json"), baseline=None, artifact=[], output=None)
    assert main(GateConfig(), arguments) == GATE_FAILED
    findings = json.loads((tmp_path / "out" / "gate.json").read_text())["findings"]
    assert {each["check"] for each in findings if each["outcome"] == "fail"} == {"simulated", "lossless"}


def test_only_chains_are_simulated():
    tree = StaticTree(kind="static", branching=[2])
    with pytest.raises(ValueError, match="simulate_acceptance is for lossless chains"):
        EvalConfig(decode=DecodeConfig(tree=tree), simulate_acceptance=[0.5])

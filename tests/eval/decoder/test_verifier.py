"""Drawn acceptance comes at the rates asked for, costs what judging costs, and leaves a report that no gate takes."""

import argparse
import json
from functools import partial

import pytest
import torch

from configs.runtime.command import DONE, GATE_FAILED
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import StaticTree
from configs.schema.evaluation import EvalConfig, GateConfig, LosslessConfig, SuiteConfig
from configs.schema.target import TargetConfig
from eval.decoder.decode import Request, decode
from eval.decoder.verifier import SimulatedVerifier, Verifier
from eval.evaluation import evaluate
from eval.gate import main
from eval.report.schema import load_report
from heads.proposers.draft_lm import DraftLM
from heads.proposers.protocol import Proposal
from heads.sampling.counter_rng import CounterRNG


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_stay_at_the_rates_asked_for(temperature, tiny_llama, as_target):
    target, draft = as_target(tiny_llama(seed=1)), DraftLM(tiny_llama(seed=2), 64)
    requests = [Request(prompt_id=f"p{n}", category="c", tokens=(7, n)) for n in range(40)]
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=60, temperature=temperature)
    simulated = partial(SimulatedVerifier, rates=[0.8, 0.5])
    generations, _ = decode(target, requests, config, draft, make_verifier=simulated)
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
        lossless=LosslessConfig(),
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


@pytest.mark.parametrize("verification", ["token", "block"])
def test_rows_of_a_batch_are_judged_by_the_distribution_of_whoever_drafted_them(verification):
    """Row by row the same as alone: a looked-up row by a point mass, whatever stands in its place of the draft's own."""
    config = DecodeConfig(temperature=1.0, verification=verification)
    B, G, V = 200, 2, 5
    generator = torch.Generator().manual_seed(3)
    logits_BKV = torch.randn(B, G + 1, V, generator=generator)
    tokens_BG = torch.randint(V, (B, G), generator=generator)
    q_BGV = torch.rand(B, G, V, generator=generator).softmax(-1)
    by_lookup = [number % 2 == 0 for number in range(B)]

    def chain(rows, **drawn):
        verifier = Verifier(config, CounterRNG(0, rows, torch.device("cpu")))
        proposal = Proposal(tokens_BG=tokens_BG[rows], num_drafted=[G] * len(rows), **drawn)
        return torch.stack(verifier.chain(logits_BKV[rows], proposal, [G] * len(rows), [7] * len(rows)), 1)

    together = chain(list(range(B)), probs_BGV=q_BGV, by_lookup=by_lookup)
    points_BGV = torch.nn.functional.one_hot(tokens_BG, V).float()
    for row in range(B):
        own_BGV = (points_BGV if by_lookup[row] else q_BGV)[row : row + 1]
        assert torch.equal(together[row : row + 1], chain([row], probs_BGV=own_BGV))
        if by_lookup[row]:  # and where the whole batch was looked up, so that the draft was not asked
            assert torch.equal(together[row : row + 1], chain([row], by_lookup=[True]))

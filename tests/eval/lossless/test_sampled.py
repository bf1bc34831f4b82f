"""Samples under test: a lossless decoder passes as often as promised, a lossy one is named, too little is left open."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import GateConfig, LosslessConfig
from eval import release
from eval.decoder import rules as verify
from eval.decoder.decode import Request, decode
from eval.lossless import verdict
from eval.lossless.teacher_forcing import pair_answers
from eval.lossless.verdict import judge_lossless
from eval.report.text import headline
from heads.sampling.probabilities import token_probabilities
from tests.support.decoding import loaded_draft
from tests.support.reports import changed

VOCAB = 10
SAMPLED = DecodeConfig(temperature=1.0, num_speculative_tokens=3, max_new_tokens=12, batch_size=32)
CHECKS = LosslessConfig(first_token_samples=256)
MANY = CHECKS.model_copy(update={"first_token_samples": 512})


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1, vocab_size=VOCAB))


@pytest.fixture(scope="module")
def draft(tiny_llama):
    """A draft that is right about half the time."""
    return loaded_draft(tiny_llama(seed=2, vocab_size=VOCAB), VOCAB).proposer


def sample_both(target, draft, settings, num_prompts=32):
    requests = [Request(prompt_id=f"p{n}", category="c", tokens=(7, n % VOCAB, n // VOCAB)) for n in range(num_prompts)]
    return decode(target, requests, settings)[0], decode(target, requests, settings, draft)[0]


def judge(target, draft, settings=SAMPLED, checks=CHECKS, num_prompts=32):
    return judge_lossless(target, *sample_both(target, draft, settings, num_prompts), settings, checks, draft)


def test_a_lossless_decoder_is_found_lossless_and_the_section_says_on_what_grounds(target, draft):
    section = judge(target, draft)
    assert (section["verdict"], section["failed_checks"], section["inconclusive_checks"]) == ("lossless", [], [])
    test = section["checks"]["first_tokens"]
    assert (test["outcome"], test["num_samples"], section["checked_prompts"]) == ("pass", 256, 1)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_wrong_residual_turns_the_verdict(target, draft, verification, monkeypatch):
    finish = verify._finish

    def without_residual(p_BKV, q_BGV, *others):
        return finish(p_BKV, torch.zeros_like(q_BGV), *others)

    monkeypatch.setattr(verify, "_finish", without_residual)
    section = judge(target, draft, SAMPLED.model_copy(update={"verification": verification}), MANY)
    assert section["verdict"] == "not_lossless"
    assert section["checks"]["first_tokens"]["p_value"] <= 0.01


def test_a_mistake_around_the_rule_is_found(target, draft, monkeypatch):
    def too_sure(logits, sampling):
        return token_probabilities(logits, sampling.model_copy(update={"temperature": 0.6}))

    plain = sample_both(target, draft, SAMPLED)[0]
    monkeypatch.setattr("eval.decoder.verifier.token_probabilities", too_sure)
    assert judge_lossless(target, plain, plain, SAMPLED, MANY, draft)["failed_checks"] == ["first_tokens"]


def test_a_test_that_would_miss_what_it_must_show_leaves_the_verdict_open(target, draft, monkeypatch):
    first = {"p_value": 0.5, "reason": None, "detectable_difference": 0.1, "num_samples": 256}
    monkeypatch.setattr(verdict, "check_first_tokens", lambda *_: dict(first))
    for must_show, expected in ((0.099, "inconclusive"), (0.101, "lossless")):
        checks = CHECKS.model_copy(update={"must_show_variation": must_show})
        assert judge_lossless(target, [], [], SAMPLED, checks, draft)["verdict"] == expected


def test_a_test_that_is_off_is_not_run_and_decides_nothing(target, draft, report):
    section = judge(target, draft, checks=CHECKS.model_copy(update={"first_token_samples": 0}), num_prompts=1)
    assert (section["verdict"], section["checks"]) == ("inconclusive", {})
    untested = changed(report, {"decode.temperature": 1.0, "lossless": section})
    (found,) = (each for each in release.judge(untested, GateConfig()).findings if each.check == "lossless")
    assert (found.outcome, "lossless.first_token_samples" in found.reason) == ("inconclusive", True)
    assert "lossless.first_token_samples" in headline(untested)


def test_sides_that_answer_other_requests_are_refused(target, draft):
    plain, speculative = sample_both(target, draft, SAMPLED, 2)
    for other in (speculative[:1], [speculative[0], replace(speculative[1], turn=1)]):
        with pytest.raises(ValueError, match="the same requests"):
            pair_answers(plain, other)

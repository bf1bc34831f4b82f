"""Samples under test: a lossless decoder passes as often as promised, a lossy one is named, too little is left open."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from eval.decoder import rules as verify
from eval.decoder.decode import Request, decode
from eval.lossless import verdict
from eval.lossless.verdict import MIN_PROMPTS, check_likelihood, judge_lossless
from eval.metrics.likelihood import mean_log_likelihood, pair_answers
from heads.sampling.probabilities import token_probabilities
from tests.support.decoding import loaded_draft

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


# --- the verdict --------------------------------------------------------------------------------------------------


def test_a_lossless_decoder_is_found_lossless_and_the_section_says_on_what_grounds(target, draft):
    section = judge(target, draft)
    assert (section["verdict"], section["failed_checks"], section["inconclusive_checks"]) == ("lossless", [], [])
    assert section["checked_prompts"] == 32
    assert {name: check["outcome"] for name, check in section["checks"].items()} == {
        "likelihood": "pass",
        "first_tokens": "pass",
    }
    tests = [section["checks"][name] for name in ("likelihood", "first_tokens")]
    assert (tests[0]["num_prompts"], tests[1]["num_samples"]) == (32, 256)
    smaller, larger = sorted(tests, key=lambda test: test["p_value"])  # adjusted for there being two
    assert smaller["adjusted_p_value"] == pytest.approx(min(1.0, 2 * smaller["p_value"]))
    assert larger["adjusted_p_value"] == max(larger["p_value"], smaller["adjusted_p_value"])


@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_wrong_residual_turns_the_verdict(target, draft, verification, monkeypatch):
    finish = verify._finish

    def without_residual(p_BKV, q_BGV, *others):
        return finish(p_BKV, torch.zeros_like(q_BGV), *others)

    monkeypatch.setattr(verify, "_finish", without_residual)
    section = judge(target, draft, SAMPLED.model_copy(update={"verification": verification}), MANY)
    assert section["verdict"] == "not_lossless"
    assert "first_tokens" in section["failed_checks"]
    assert section["checks"]["first_tokens"]["adjusted_p_value"] <= 0.01


def test_a_mistake_around_the_rule_is_found_by_both_tests_of_samples(target, draft, monkeypatch):
    def too_sure(logits, sampling):
        return token_probabilities(logits, sampling.model_copy(update={"temperature": 0.6}))

    plain = sample_both(target, draft, SAMPLED)[0]
    monkeypatch.setattr("eval.decoder.verifier.token_probabilities", too_sure)
    speculative = sample_both(target, draft, SAMPLED)[1]
    section = judge_lossless(target, plain, speculative, SAMPLED, MANY, draft)
    assert section["verdict"] == "not_lossless"
    assert section["failed_checks"] == ["likelihood", "first_tokens"]
    assert section["checks"]["likelihood"]["mean_difference"] > 0.1


def test_a_test_that_would_miss_what_it_must_show_leaves_the_verdict_open(target, draft, monkeypatch):
    first = {"p_value": 0.5, "reason": None, "detectable_difference": 0.1, "num_samples": 256}
    monkeypatch.setattr(verdict, "check_first_tokens", lambda *_: first)
    monkeypatch.setattr(verdict, "check_likelihood", lambda *_: first | {"num_prompts": 32})
    for key in ("must_show_variation", "must_show_nats"):
        for must_show, expected in ((0.099, "inconclusive"), (0.101, "lossless")):
            checks = CHECKS.model_copy(update={key: must_show})
            assert judge_lossless(target, [], [], SAMPLED, checks, draft)["verdict"] == expected


def test_too_few_prompts_leave_the_verdict_open_unless_another_check_fails(target, draft, monkeypatch):
    few_prompts = judge(target, draft, num_prompts=MIN_PROMPTS - 1)
    assert (few_prompts["verdict"], few_prompts["inconclusive_checks"]) == ("inconclusive", ["likelihood"])
    assert few_prompts["checks"]["likelihood"]["reason"] == "too_few_prompts"
    monkeypatch.setattr(verdict, "check_first_tokens", lambda *_: {"p_value": 1e-9, "detectable_difference": 0.1})
    assert judge(target, draft, num_prompts=4)["verdict"] == "not_lossless"


@pytest.mark.parametrize(
    ("changed", "names", "verdict"),
    [({"false_alarm_rate": None}, set(), "inconclusive"), ({"first_token_samples": 0}, {"likelihood"}, "lossless")],
)
def test_tests_that_are_off_are_not_run(target, draft, changed, names, verdict):
    section = judge(target, draft, checks=CHECKS.model_copy(update=changed))
    assert section["checks"].keys() == names
    assert section["verdict"] == verdict


# --- likelihood ---------------------------------------------------------------------------------------------------


def test_the_log_likelihood_is_the_mean_over_the_answers_tokens(target, draft):
    (answer,) = sample_both(target, draft, SAMPLED, 1)[0]
    total, text = 0.0, list(answer.prompt_tokens)
    for token in answer.tokens:
        logits_V = target.model(torch.tensor([text])).logits[0, -1].detach() / 0.7
        total += float(logits_V.log_softmax(-1)[token])
        text.append(token)
    assert mean_log_likelihood(target, answer, 0.7) == pytest.approx(total / len(answer.tokens), rel=1e-5)


def test_sample_and_match_draws_the_very_same_answers(target, draft):
    both = sample_both(target, draft, SAMPLED.model_copy(update={"verification": "match"}))
    found = check_likelihood(target, pair_answers(*both), SAMPLED)
    assert (found["num_identical"], found["mean_difference"], found["p_value"]) == (32, 0.0, 1.0)


def test_a_prompt_asked_in_several_turns_counts_once_and_failed_answers_are_left_out(target, draft):
    pairs = pair_answers(*sample_both(target, draft, SAMPLED))
    turns = [tuple(replace(answer, prompt_id=f"p{n // 2}", turn=n % 2) for answer in pair) for n, pair in enumerate(pairs)]
    found, alone = check_likelihood(target, turns, SAMPLED), check_likelihood(target, pairs, SAMPLED)
    assert (found["num_prompts"], found["num_answers"]) == (16, 32)
    assert found["mean_difference"] == pytest.approx(alone["mean_difference"])
    failed = (pairs[3][0], replace(pairs[3][1], stop_reason="non_finite", tokens=()))
    found = check_likelihood(target, [*pairs[:3], failed, *pairs[4:]], SAMPLED)
    assert (found["num_prompts"], found["num_failed"]) == (31, 1)


def test_sides_that_answer_other_requests_are_refused(target, draft):
    plain, speculative = sample_both(target, draft, SAMPLED, 2)
    for other in (speculative[:1], [speculative[0], replace(speculative[1], turn=1)]):
        with pytest.raises(ValueError, match="the same requests"):
            pair_answers(plain, other)

"""Counting first tokens: the cells are the target's exact distribution, a lossless decoder passes as often as promised, bugs
do not."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import GateConfig, LosslessConfig
from eval import lossless as verdict
from eval import release
from eval.decoder import rules as verify
from eval.decoder.decode import Request, decode
from eval.lossless import MIN_EXPECTED, check_first_tokens, choose_start, find_cells, judge_lossless
from eval.report.text import headline
from eval.teacher_forcing import answer_logits, pair_answers
from heads.proposers.draft_lm import DraftLM
from tests.support.family_configs import VOCAB_SIZE, tiny_model
from tests.support.reports import changed

VOCAB = 10
PROMPT = (7, 2, 3)
START = Request(prompt_id="p", category="c", tokens=PROMPT)
SAMPLED = DecodeConfig(temperature=1.0, num_speculative_tokens=3, max_new_tokens=8, batch_size=4, verification="block")


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1, vocab_size=VOCAB))


@pytest.fixture(scope="module")
def draft(tiny_llama):
    """A draft that is right about half the time."""
    return DraftLM(tiny_llama(seed=2, vocab_size=VOCAB), VOCAB)


@pytest.fixture(scope="module")
def plain(target):
    requests = [Request(prompt_id=f"p{n}", category="c", tokens=(*PROMPT, n)) for n in range(3)]
    return decode(target, requests, SAMPLED)[0]


def every_answer(num_tokens=3):
    return list(itertools.product(range(VOCAB), repeat=num_tokens))


# --- cells --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [20, 5000])
@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"temperature": 0.3}], ids=str)
def test_cells_hold_the_exact_probability_of_the_answers_that_fall_into_them(target, exact_distribution, num_samples, settings):
    sampling = SAMPLED.model_copy(update=settings)
    distribution = exact_distribution(target.model, PROMPT, 3, sampling).double()

    cells = find_cells(target, START, sampling, num_samples)

    sums = np.zeros(len(cells.probabilities))
    for answer in every_answer():
        sums[cells.find(answer)] += float(distribution[answer])
    assert cells.probabilities == pytest.approx(sums, abs=1e-6)
    assert sum(cells.probabilities) == pytest.approx(1.0, abs=1e-6)
    assert min(cells.probabilities) * num_samples >= MIN_EXPECTED - 1e-6


def test_an_answer_that_ends_early_has_a_cell(tiny_llama, as_target, target):
    first = int(answer_logits(target, PROMPT, [0])[0].argmax())
    ending = as_target(target.model, eos=[first])
    cells = find_cells(ending, START, SAMPLED, 256)
    assert cells.find((first,)) == cells.cell_of[first,]
    with pytest.raises(ValueError, match="do not reach"):
        cells.find(next(prefix for prefix in cells.cell_of if len(prefix) == 3)[:1])


# --- where to start -----------------------------------------------------------------------------------------------


def test_the_start_is_where_most_samples_come_to_the_same_choice(target, plain):
    found, num_answered = choose_start(target, plain, SAMPLED)

    def distribution_after(text):
        return target.model(torch.tensor([text])).logits[0, -1].detach().softmax(-1)

    def openness(answer, position):
        text, own = (*answer.prompt_tokens, *answer.tokens[:position]), answer.tokens[position]
        return float(distribution_after(text)[own] * (1 - sum(distribution_after((*text, own)) ** 2)))

    values = {(each.prompt_id, position): openness(each, position) for each in plain for position in range(7)}
    assert (found.prompt_id, num_answered) == max(values, key=values.get)
    answer = next(each for each in plain if each.prompt_id == found.prompt_id)
    assert found.tokens == (*answer.prompt_tokens, *answer.tokens[:num_answered])


def test_a_start_leaves_the_context_room_for_a_round(tiny_llama, as_target):
    target = as_target(tiny_llama(seed=1, vocab_size=VOCAB, max_position_embeddings=12))
    answers, _ = decode(target, [START], SAMPLED)
    found, _ = choose_start(target, answers, SAMPLED)
    assert len(found.tokens) + SAMPLED.num_speculative_tokens + 2 <= 12
    assert choose_start(target, answers, SAMPLED.model_copy(update={"num_speculative_tokens": 8}))[0] is None


# --- the test -----------------------------------------------------------------------------------------------------


def test_a_draft_that_lies_about_its_distribution_is_found_although_the_rule_is_right(target, draft, plain, monkeypatch):
    truthful = [check_first_tokens(target, draft, plain, SAMPLED.model_copy(update={"seed": seed}), 128) for seed in range(6)]
    assert min(each["p_value"] for each in truthful) > 0.01 / 6
    monkeypatch.setattr("eval.decoder.verifier._pad_vocabulary", lambda q_BGV, like: q_BGV.roll(1, dims=-1))
    assert check_first_tokens(target, draft, plain, SAMPLED, 1024)["p_value"] < 1e-4


def test_a_distribution_without_choice_and_no_answers_are_inconclusive(target, draft, plain):
    certain = check_first_tokens(target, draft, plain, SAMPLED.model_copy(update={"top_k": 1}), 128)
    nothing = check_first_tokens(target, draft, [], SAMPLED, 128)
    assert [each["p_value"] for each in (certain, nothing)] == [None] * 2
    reasons = [each["reason"] for each in (certain, nothing)]
    assert reasons == ["law_too_certain_for_so_few_samples", "no_answer_to_start_from"]


def test_samples_that_fail_leave_the_test_open(target, draft, plain, monkeypatch):
    distribution = draft.propose

    def broken(*arguments, **others):
        proposal = distribution(*arguments, **others)
        proposal.probs_BGV[0] = float("nan")
        return proposal

    monkeypatch.setattr(draft, "propose", broken)
    found = check_first_tokens(target, draft, plain, SAMPLED, 128)
    assert (found["p_value"], found["reason"]) == (None, "samples_failed")
    assert found["num_failed"] > 0


def test_a_target_that_takes_no_batches_is_sampled_one_by_one(as_target):
    target = as_target(tiny_model("gpt_neo"))
    model = copy.deepcopy(target.model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * parameter.std() * torch.randn_like(parameter))
    draft, alone = DraftLM(model, VOCAB_SIZE), SAMPLED.model_copy(update={"batch_size": 1, "top_k": 2})
    plain, _ = decode(target, [START], alone)
    assert "batches" in target.runner.refused
    found = check_first_tokens(target, draft, plain, alone, 64)
    assert (found["num_samples"], found["num_failed"]) == (64, 0)
    assert found["p_value"] > 0.001


# --- the verdict that rests on it -----------------------------------------------------------------------------------

BATCHED = SAMPLED.model_copy(update={"max_new_tokens": 12, "batch_size": 32})
CHECKS = LosslessConfig(first_token_samples=256)
MANY = CHECKS.model_copy(update={"first_token_samples": 512})


def sample_both(target, draft, settings, num_prompts=32):
    requests = [Request(prompt_id=f"p{n}", category="c", tokens=(7, n % VOCAB, n // VOCAB)) for n in range(num_prompts)]
    return decode(target, requests, settings)[0], decode(target, requests, settings, draft)[0]


def judge(target, draft, settings=BATCHED, checks=CHECKS, num_prompts=32):
    plain, drafted = sample_both(target, draft, settings, num_prompts)
    return judge_lossless(target, plain, {"speculative": drafted}, settings, checks, draft)


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
    section = judge(target, draft, BATCHED.model_copy(update={"verification": verification}), MANY)
    assert section["verdict"] == "not_lossless"
    assert section["checks"]["first_tokens"]["p_value"] <= 0.01


def test_a_test_that_would_miss_what_it_must_show_leaves_the_verdict_open(target, draft, monkeypatch):
    first = {"p_value": 0.5, "reason": None, "detectable_difference": 0.1, "num_samples": 256}
    monkeypatch.setattr(verdict, "check_first_tokens", lambda *_: dict(first))
    for must_show, expected in ((0.099, "inconclusive"), (0.101, "lossless")):
        monkeypatch.setattr(verdict, "MUST_SHOW", must_show)
        assert judge_lossless(target, [], {"speculative": []}, BATCHED, CHECKS, draft)["verdict"] == expected


def test_a_test_that_is_off_is_not_run_and_decides_nothing(target, draft, report):
    section = judge(target, draft, checks=CHECKS.model_copy(update={"first_token_samples": 0}), num_prompts=1)
    assert (section["verdict"], section["checks"]) == ("inconclusive", {})
    untested = changed(report, {"decode.temperature": 1.0, "lossless": section})
    (found,) = (each for each in release.judge(untested, GateConfig()).findings if each.check == "lossless")
    assert (found.outcome, "lossless.first_token_samples" in found.reason) == ("inconclusive", True)
    assert "lossless.first_token_samples" in headline(untested)


def test_sides_that_answer_other_requests_are_refused(target, draft):
    plain, speculative = sample_both(target, draft, BATCHED, 2)
    for other in (speculative[:1], [speculative[0], replace(speculative[1], turn=1)]):
        with pytest.raises(ValueError, match="the same requests"):
            pair_answers(plain, other)

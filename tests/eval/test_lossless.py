"""The verdict tells rounding from mistakes: no difference, a tie, a wrong token, a missed stop, a rule that changes the
distribution."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from eval import teacher_forcing
from eval.decoder.decode import Request, decode
from eval.lossless import judge_lossless
from eval.teacher_forcing import check_tokens
from heads.inference.causal_lm import head_logits
from heads.inference.kv_cache import RowLayer
from tests.support.decoding import PROMPTS, loaded_draft, requests_for

PROMPT = (7, 12, 3)
GREEDY = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12)
CHECKS = LosslessConfig()


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


@pytest.fixture(scope="module")
def plain(target):
    """One prompt's greedy answer."""
    requests = [Request(prompt_id="p", category="c", tokens=PROMPT)]
    return decode(target, requests, GREEDY)[0]


@pytest.fixture(scope="module")
def draft(tiny_llama):
    """A draft that is rarely right."""
    return loaded_draft(tiny_llama(seed=2), 64).proposer


def with_tokens(generation, tokens):
    """The same request with another answer."""
    return replace(generation, tokens=tuple(tokens), rounds=())


def with_token(generation, position, token):
    return with_tokens(generation, [*generation.tokens[:position], token, *generation.tokens[position + 1 :]])


def verdict_of(target, plain, other, config=CHECKS, decoding=GREEDY):
    return judge_lossless(target, plain, other, decoding, config, None)["verdict"]


def continued(target, answer, position):
    """The answer's first tokens, and what the target greedily says after them."""
    request = Request(prompt_id="p", category="c", tokens=(*answer.prompt_tokens, *answer.tokens[:position]))
    (rest,), _ = decode(target, [request], GREEDY.model_copy(update={"max_new_tokens": 12 - position}))
    return with_tokens(answer, [*answer.tokens[:position], *rest.tokens])


def naive_logits(target, prefix):
    """The target's logits after a prefix, by transformers' own forward."""
    return target.model(input_ids=torch.tensor([prefix]), use_cache=False).logits[0, -1].detach()


# --- greedy -------------------------------------------------------------------------------------------------------


def test_equal_answers_are_lossless_and_every_token_is_counted_or_nothing_is_decided(target, plain):
    section = judge_lossless(target, plain, plain, GREEDY, CHECKS, None)
    assert (section["verdict"], section["checked_prompts"], section["checked_tokens"]) == ("lossless", 1, 12)
    assert (section["divergences"], section["largest_gap"]) == ([], 0.0)
    failed = [replace(plain[0], tokens=(), stop_reason="error")]
    section = judge_lossless(target, plain, failed, GREEDY, CHECKS, None)
    assert (section["verdict"], section["checked_tokens"], section["inconclusive_checks"]) == ("inconclusive", 0, ["greedy"])


@pytest.mark.parametrize("position", [0, 5, 11])
def test_a_wrong_token_is_found_where_it_is_with_the_gap_of_the_targets_logits(target, plain, position):
    logits_V = naive_logits(target, [*PROMPT, *plain[0].tokens[:position]])
    best, other = plain[0].tokens[position], int(logits_V.argmin())
    assert best == int(logits_V.argmax())

    wrong = with_tokens(plain[0], [*plain[0].tokens[:position], other, *[5] * (11 - position)])
    found = check_tokens(target, plain, [wrong], tie_noise=4.0)

    (departs,), (first, *_) = found.divergences, found.wrong_tokens
    assert (departs.prompt_id, departs.position, departs.plain_token, departs.speculative_token) == ("p", position, best, other)
    assert (first.prompt_id, first.position, first.token) == ("p", position, other)
    assert departs.logit_gap == first.logit_gap == pytest.approx(float(logits_V.max() - logits_V.min()), rel=1e-6)
    assert not departs.is_tie
    assert verdict_of(target, plain, [with_token(plain[0], position, other)]) == "not_lossless"


def test_a_wrong_token_is_found_where_plain_decoding_has_it_too(target, plain):
    wrong = [with_token(plain[0], 9, 5)]
    section = judge_lossless(target, wrong, wrong, GREEDY, CHECKS, None)
    assert (section["verdict"], section["failed_checks"], section["divergences"]) == ("not_lossless", ["greedy"], [])
    assert section["checks"]["greedy"]["first_wrong_tokens"][0]["position"] == 9


def test_two_tokens_with_equal_logits_are_a_tie_behind_which_a_wrong_token_is_found(target, plain, as_target):
    best = plain[0].tokens[6]
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        model.lm_head.weight[(best + 1) % 64] = model.lm_head.weight[best]
    tied = as_target(model)
    tie = continued(tied, with_token(plain[0], 6, (best + 1) % 64), 7)
    section = judge_lossless(tied, plain, [tie], GREEDY, CHECKS, None)
    assert (section["verdict"], len(section["divergences"])) == ("lossless_up_to_ties", 1)
    assert section["divergences"][0]["logit_gap"] == 0.0
    section = judge_lossless(tied, plain, [with_token(tie, 10, (tie.tokens[10] + 1) % 64)], GREEDY, CHECKS, None)
    assert (section["verdict"], section["divergences"][0]["position"]) == ("not_lossless", 6)
    assert section["checks"]["greedy"]["first_wrong_tokens"][0]["position"] == 10


@pytest.fixture(scope="module")
def rounded(target, as_target):
    """The target in bfloat16."""
    return as_target(copy.deepcopy(target.model).bfloat16())


def test_the_tolerance_is_in_multiples_of_the_usual_rounding_error(plain, rounded, monkeypatch):
    monkeypatch.setattr(teacher_forcing, "AT_ONCE", 5)  # pieces of an answer make one whole
    exact, errors, least, gaps = copy.deepcopy(rounded.model).float(), [], [], []
    for position, token in enumerate(plain[0].tokens):
        prefix = [*PROMPT, *plain[0].tokens[:position]]
        exact_V = exact(input_ids=torch.tensor([prefix])).logits[0, -1].detach().double()
        shift_C = (naive_logits(rounded, prefix) - exact_V)[exact_V.topk(32).indices]
        errors.append(float((shift_C - shift_C[0]).abs().max()))
        least.append(2.0**-7 * float(exact_V.max()))
        gaps.append(float(exact_V.max() - exact_V[token]))
    usual = float(torch.tensor(errors).quantile(0.9))
    expected = [4.0 * max(pair[0], usual, pair[1]) for pair in zip(errors, least, strict=True)]

    found = check_tokens(rounded, plain, plain, tie_noise=4.0)

    assert found.tolerance == pytest.approx(sorted(expected)[5], rel=1e-2)
    assert found.largest_gap == pytest.approx(max(gaps), rel=1e-3, abs=1e-5)
    shares = [gap / tolerance for gap, tolerance in zip(gaps, expected, strict=True)]
    assert found.largest_gap_in_tolerances == pytest.approx(max(shares), rel=1e-2, abs=1e-5)
    assert sorted({usual > max(pair) for pair in zip(errors, least, strict=True)}) == [False, True]

    last = [with_token(plain[0], 11, int(naive_logits(rounded, [*PROMPT, *plain[0].tokens[:11]]).argmin()))]
    gap = check_tokens(rounded, plain, last, tie_noise=4.0).divergences[0].logit_gap
    for times, is_tie in ((0.95, False), (1.05, True)):
        noise = times * gap / (expected[11] / 4.0)
        assert check_tokens(rounded, plain, last, tie_noise=noise).divergences[0].is_tie == is_tie


@pytest.mark.parametrize("shorter_side", ["plain", "speculative"])
def test_an_answer_that_is_the_beginning_of_the_other_is_never_a_tie(target, plain, shorter_side):
    cut = [with_tokens(plain[0], plain[0].tokens[:5])]
    pair = (cut, plain) if shorter_side == "plain" else (plain, cut)

    found = check_tokens(target, *pair, tie_noise=10.0)

    assert [(each.position, each.is_tie) for each in found.divergences] == [(5, False)]
    assert found.wrong_tokens == []
    assert verdict_of(target, *pair, LosslessConfig(tie_noise=10.0)) == "not_lossless"


def test_an_answer_that_goes_on_behind_its_end_is_wrong_though_every_token_is_the_targets_choice(target, plain, as_target):
    ending = as_target(target.model, eos=(plain[0].tokens[8],))
    section = judge_lossless(ending, plain, plain, GREEDY, CHECKS, None)
    assert (section["verdict"], section["checks"]["greedy"]["wrong_ends"]) == ("not_lossless", 1)
    assert section["checks"]["greedy"]["wrong_tokens"] == 0


# --- planted mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["own", "wider"])
def test_what_is_not_finite_excuses_no_token(rounded, plain, broken, monkeypatch):
    def overflowing(model, hidden):
        logits = head_logits(model, hidden)
        return logits * float("inf") if (model is rounded.model) == (broken == "own") else logits

    monkeypatch.setattr(teacher_forcing, "head_logits", overflowing)
    found = check_tokens(rounded, plain, [with_token(plain[0], 11, 5)], tie_noise=2.0)
    assert found.wrong_tokens[-1].position == 11
    assert found.tolerance < 1


LONG = GREEDY.model_copy(update={"max_new_tokens": 40})


def test_a_cache_that_loses_a_position_late_is_found_though_plain_decoding_loses_it_too(target, draft, monkeypatch):
    written = RowLayer._written

    def losing(layer, stored, states):
        if layer.slots.end > 30:
            stored[:, :, 12] = 0
        return written(layer, stored, states)

    with monkeypatch.context() as patch:
        patch.setattr(RowLayer, "_written", losing)
        answers, _ = decode(target, requests_for([PROMPT]), LONG, draft)
    section = judge_lossless(target, answers, answers, LONG, CHECKS, None)
    assert section["verdict"] == "not_lossless"
    assert section["checks"]["greedy"]["first_wrong_tokens"][0]["position"] >= 26


def test_the_answers_of_a_cache_in_int8_are_read_through_one(target, draft):
    config = LONG.model_copy(update={"kv_cache": "int8", "max_new_tokens": 100})
    plain, speculative = (decode(target, requests_for(PROMPTS), config, each)[0] for each in (None, draft))
    assert verdict_of(target, plain, speculative, decoding=config) == "lossless"
    assert verdict_of(target, plain, speculative, decoding=config.model_copy(update={"kv_cache": None})) == "not_lossless"

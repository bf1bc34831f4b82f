"""The verdict tells rounding from mistakes: no difference, a tie, a real one, a missed stop, a rule that changes the
distribution."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from eval.decoder import verifier
from eval.decoder.chain_rules import ChainVerification, verify_block
from eval.decoder.decode import Request, decode
from eval.lossless import verdict as lossless
from eval.lossless.verdict import find_divergences, is_tie, judge_lossless
from tests.support.decoding import loaded_draft

PROMPT = (7, 12, 3)
GREEDY = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12)
WITHOUT_FLOAT32 = LosslessConfig(check_float32_prompts=0)
ONLY_THE_RULE = LosslessConfig(check_float32_prompts=0, false_alarm_rate=None)


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


@pytest.fixture(scope="module")
def plain(target):
    """One prompt's greedy answer."""
    requests = [Request(prompt_id="p", category="c", tokens=PROMPT)]
    return decode(target, requests, GREEDY)[0]


@pytest.fixture(scope="module")
def draft_for(tiny_llama):
    """Load a draft for a target: the same wrong-headed draft in the target's dtype."""
    return lambda target: loaded_draft(copy.deepcopy(tiny_llama(seed=2)).to(target.model.dtype), 64)


def no_draft(target):
    raise AssertionError("no draft is needed here")


def with_tokens(generation, tokens):
    """The same request with another answer."""
    return replace(generation, tokens=tuple(tokens), rounds=())


def with_token(generation, position, token):
    return with_tokens(generation, [*generation.tokens[:position], token, *generation.tokens[position + 1 :]])


def verdict_of(target, plain, other, config=WITHOUT_FLOAT32):
    return judge_lossless(target, plain, other, GREEDY, config, no_draft)["verdict"]


def naive_logits(target, prefix):
    """The target's logits after a prefix, by transformers' own forward."""
    return target.model(input_ids=torch.tensor([prefix]), use_cache=False).logits[0, -1].detach()


# --- greedy -------------------------------------------------------------------------------------------------------


def test_equal_answers_are_lossless(target, plain):
    section = judge_lossless(target, plain, plain, GREEDY, WITHOUT_FLOAT32, no_draft)
    assert (section["verdict"], section["checked_prompts"], section["divergences"]) == ("lossless", 1, [])


@pytest.mark.parametrize("position", [0, 5, 11])
def test_a_real_difference_is_found_where_it_is_with_the_gap_of_the_targets_logits(target, plain, position):
    logits_V = naive_logits(target, [*PROMPT, *plain[0].tokens[:position]])
    best, other = plain[0].tokens[position], int(logits_V.argmin())
    assert best == int(logits_V.argmax())

    also_later = with_tokens(plain[0], [*plain[0].tokens[:position], other, *[5] * (11 - position)])
    (found,) = find_divergences(target, plain, [also_later], tie_noise=4.0)

    assert (found.prompt_id, found.position, found.plain_token, found.speculative_token) == ("p", position, best, other)
    assert found.logit_gap == pytest.approx(float(logits_V.max() - logits_V.min()), rel=1e-6)
    assert not is_tie(found)
    assert verdict_of(target, plain, [with_token(plain[0], position, other)]) == "not_lossless"


@pytest.fixture(scope="module")
def tie(plain):
    """The plain answer, in which one token gave way to the next in the vocabulary."""
    return with_token(plain[0], 6, (plain[0].tokens[6] + 1) % 64)


@pytest.fixture(scope="module")
def tied(target, plain, as_target):
    """The target, to which those two tokens are equally good."""
    best = plain[0].tokens[6]
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        model.lm_head.weight[(best + 1) % 64] = model.lm_head.weight[best]
    return as_target(model)


def test_two_tokens_with_equal_logits_are_a_tie(tied, plain, tie):
    section = judge_lossless(tied, plain, [tie], GREEDY, WITHOUT_FLOAT32, no_draft)
    assert section["verdict"] == "lossless_up_to_ties"
    assert section["divergences"][0].logit_gap == 0.0


@pytest.fixture(scope="module")
def rounded(target, as_target):
    """The target in bfloat16."""
    return as_target(copy.deepcopy(target.model).bfloat16())


def test_the_tolerance_is_in_multiples_of_the_usual_rounding_error(target, plain, rounded):
    exact = copy.deepcopy(rounded.model).float()
    errors, from_others = [], []
    for position in range(len(plain[0].tokens)):
        prefix = [*PROMPT, *plain[0].tokens[:position]]
        exact_V = exact(input_ids=torch.tensor([prefix])).logits[0, -1].detach().double()
        errors.append(float((naive_logits(rounded, prefix) - exact_V)[exact_V.topk(32).indices].abs().max()))
        smallest = max(errors[-1], 2.0**-7 * float(exact_V.max()))
        error = max(smallest, float(torch.tensor(errors).quantile(0.9)))
        from_others.append(error > smallest)

        one, other = int(exact_V.argmax()), int(exact_V.argmin())
        answers = [with_token(plain[0], position, one)], [with_token(plain[0], position, other)]
        (found,) = find_divergences(rounded, *answers, tie_noise=4.0)

        assert found.tie_tolerance == pytest.approx(4.0 * error, rel=1e-3)
        assert found.logit_gap == pytest.approx(float(exact_V.max() - exact_V.min()), rel=1e-4)
        in_errors = found.logit_gap / error
        for times, tie in ((in_errors - 0.1, False), (in_errors + 0.1, True)):
            assert is_tie(find_divergences(rounded, *answers, tie_noise=times)[0]) == tie
    assert any(from_others)


@pytest.mark.parametrize(("dtype", "wider"), [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64")])
def test_a_target_is_measured_against_the_next_wider_dtype(target, as_target, dtype, wider):
    dtype, wider = getattr(torch, dtype), getattr(torch, wider)
    assert lossless.widened(as_target(copy.deepcopy(target.model).to(dtype))).model.dtype == wider


def test_a_draw_between_two_wrong_tokens_is_no_tie(target, plain, as_target):
    # Both are far below the target's own choice, so that neither can have come from rounding.
    first, second = (int(token) for token in naive_logits(target, PROMPT).argsort()[:2])
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        model.lm_head.weight[second] = model.lm_head.weight[first]
    answers = [with_token(plain[0], 0, first)], [with_token(plain[0], 0, second)]
    assert verdict_of(as_target(model), *answers) == "not_lossless"


@pytest.mark.parametrize("shorter_side", ["plain", "speculative"])
def test_an_answer_that_is_the_beginning_of_the_other_is_never_a_tie(target, plain, shorter_side):
    cut = [with_tokens(plain[0], plain[0].tokens[:5])]
    pair = (cut, plain) if shorter_side == "plain" else (plain, cut)

    (found,) = find_divergences(target, *pair, tie_noise=10.0)

    assert found.position == 5
    assert not is_tie(found)
    assert verdict_of(target, *pair, LosslessConfig(check_float32_prompts=0, tie_noise=10.0)) == "not_lossless"


def test_one_real_difference_among_ties_decides_the_verdict(tied, plain, tie):
    two_plain = [plain[0], replace(plain[0], prompt_id="q")]
    real = replace(with_token(plain[0], 3, (plain[0].tokens[3] + 1) % 64), prompt_id="q")
    assert verdict_of(tied, two_plain, [tie, two_plain[1]]) == "lossless_up_to_ties"
    assert verdict_of(tied, two_plain, [tie, real]) == "not_lossless"


# --- once more in float32 -----------------------------------------------------------------------------------------


def test_the_float32_check_decodes_the_first_prompts_both_ways_and_leaves_the_target_as_it_is(target, plain, draft_for):
    dtypes = []

    def load(other):
        dtypes.append(other.model.dtype)
        return draft_for(other)

    section = judge_lossless(target, plain, plain, GREEDY, LosslessConfig(check_float32_prompts=3), load)

    check = section["checks"]["float32_greedy"]
    assert (check["outcome"], check["checked_prompts"], check["divergences"]) == ("pass", 1, [])
    assert section["verdict"] == "lossless"
    assert dtypes == [torch.float32]
    assert target.model.dtype == torch.float64


def test_a_broken_greedy_rule_is_caught_by_the_float32_check_alone(target, plain, draft_for, monkeypatch):
    def accept_everything(target_tokens_BK, tokens_BG, num_drafted_B):
        return ChainVerification(num_drafted_B, target_tokens_BK.gather(1, num_drafted_B.unsqueeze(1)).squeeze(1))

    monkeypatch.setattr("eval.decoder.verifier.verify_greedy", accept_everything)
    assert verdict_of(target, plain, plain) == "lossless"
    section = judge_lossless(target, plain, plain, GREEDY, LosslessConfig(check_float32_prompts=1), draft_for)
    assert (section["verdict"], section["failed_checks"]) == ("not_lossless", ["float32_greedy"])


# --- sampling -----------------------------------------------------------------------------------------------------


def test_sampled_answers_may_differ_and_the_rule_decides(target, plain):
    sampled = GREEDY.model_copy(update={"temperature": 1.0, "verification": "block"})
    others = [with_token(plain[0], 3, 5)]
    section = judge_lossless(target, plain, others, sampled, ONLY_THE_RULE, no_draft)
    assert (section["verdict"], section["divergences"], section["checked_prompts"]) == ("lossless", [], 0)
    assert section["checks"]["enumeration"]["rule"] == "block"


def test_a_rule_that_accepts_a_little_too_often_turns_the_verdict(target, plain, draft_for, monkeypatch):
    def lenient(p, q, tokens, num_drafted, accept, residual, bonus):
        return verify_block(p, q, tokens, num_drafted, accept * 0.99, residual, bonus)

    sampled = GREEDY.model_copy(update={"temperature": 1.0, "verification": "block"})
    monkeypatch.setitem(verifier.RULES, "block", lenient)
    checks = ONLY_THE_RULE.model_copy(update={"check_float32_prompts": 1})
    section = judge_lossless(target, plain, plain, sampled, checks, draft_for)
    assert section["checks"]["float32_greedy"]["divergences"] == []
    assert section["verdict"] == "not_lossless"

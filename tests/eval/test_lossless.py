"""The verdict tells rounding from mistakes: no difference, a tie, a wrong token, a missed stop, a rule that changes the
distribution."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from eval import teacher_forcing
from eval.decoder.decode import Request, decode
from eval.decoder.verifier import Verifier
from eval.lossless import judge_lossless
from eval.teacher_forcing import Reading, answer_key, check_modes, check_tokens, read_answers, widened
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


def judged(target, plain, other, config=CHECKS, decoding=GREEDY):
    return judge_lossless(target, plain, {"speculative": other}, decoding, config, None)


def verdict_of(*args, **settings):
    return judged(*args, **settings)["verdict"]


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
    section = judged(target, plain, plain)
    assert (section["verdict"], section["checked_prompts"], section["checked_tokens"]) == ("lossless", 1, 12)
    assert (section["divergences"], section["largest_gap"]) == ([], 0.0)
    failed = [replace(plain[0], tokens=(), stop_reason="error")]
    section = judged(target, plain, failed)
    assert (section["verdict"], section["checked_tokens"], section["inconclusive_checks"]) == (
        "inconclusive",
        0,
        ["greedy_autoregressive", "greedy"],
    )


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
    section = judged(target, wrong, wrong)
    assert (section["verdict"], section["divergences"]) == ("not_lossless", [])
    assert section["failed_checks"] == ["greedy_autoregressive", "greedy"]
    assert section["checks"]["greedy"]["first_wrong_tokens"][0]["position"] == 9


def test_two_tokens_with_equal_logits_are_a_tie_behind_which_a_wrong_token_is_found(target, plain, as_target):
    best = plain[0].tokens[6]
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        model.lm_head.weight[(best + 1) % 64] = model.lm_head.weight[best]
    tied = as_target(model)
    tie = continued(tied, with_token(plain[0], 6, (best + 1) % 64), 7)
    section = judged(tied, plain, [tie])
    assert (section["verdict"], len(section["divergences"])) == ("lossless_up_to_ties", 1)
    assert section["divergences"][0]["logit_gap"] == 0.0
    section = judged(tied, plain, [with_token(tie, 10, (tie.tokens[10] + 1) % 64)])
    assert (section["verdict"], section["divergences"][0]["position"]) == ("not_lossless", 6)
    assert section["checks"]["greedy"]["first_wrong_tokens"][0]["position"] == 10


@pytest.fixture(scope="module")
def rounded(target, as_target):
    """The target in bfloat16."""
    return as_target(copy.deepcopy(target.model).bfloat16())


def test_gaps_are_in_rounding_errors_at_their_positions_or_at_the_median_one(plain, rounded, monkeypatch):
    monkeypatch.setattr(teacher_forcing, "AT_ONCE", 5)  # pieces of an answer make one whole
    exact, errors, gaps = copy.deepcopy(rounded.model).float(), [], []
    for position, token in enumerate(plain[0].tokens):
        prefix = [*PROMPT, *plain[0].tokens[:position]]
        exact_V = exact(input_ids=torch.tensor([prefix])).logits[0, -1].detach().double()
        own_V = naive_logits(rounded, prefix).double()
        shift_C = (own_V - exact_V)[own_V.topk(32).indices]
        errors.append(float((shift_C - shift_C[0])[1:].square().mean().sqrt()))
        gaps.append(float(exact_V.max() - exact_V[token]))
    usual = float(np.median(errors))
    farthest = max(gap / max(error, usual) for gap, error in zip(gaps, errors, strict=True))
    wrong = [with_token(plain[0], 11, int(naive_logits(rounded, [*PROMPT, *plain[0].tokens[:11]]).argmin()))]

    for tie_noise, expected in ((0.1, max(0.1, 1.25 * min(farthest, 0.2))), (5.0, max(5.0, 1.25 * farthest))):
        found = check_modes(read_answers(rounded, [*plain, *wrong]), plain, {"other": wrong}, tie_noise=tie_noise)
        assert found["other"].tolerance == pytest.approx(expected, rel=2e-2)
        assert found["other"].divergences[0].tie_tolerance == pytest.approx(expected * max(errors[11], usual), rel=5e-2)
        control = found["autoregressive"]
        assert control.tolerance == 2 * tie_noise
        assert control.largest_gap == pytest.approx(max(gaps), rel=1e-3, abs=1e-5)
        assert control.largest_gap_in_roundings == pytest.approx(farthest, rel=2e-2)
        assert control.off_share == sum(gap > 0 for gap in gaps) / 12


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
    section = judged(ending, plain, plain)
    assert (section["verdict"], section["checks"]["greedy"]["wrong_ends"]) == ("not_lossless", 1)
    assert section["checks"]["greedy"]["wrong_tokens"] == 0


# --- planted mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["own", "wider"])
def test_what_is_not_finite_excuses_no_token(rounded, plain, broken, monkeypatch):
    def overflowing(model, hidden):
        logits = head_logits(model, hidden)
        return logits * float("inf") if (hidden.dtype == torch.bfloat16) == (broken == "own") else logits

    monkeypatch.setattr(teacher_forcing, "head_logits", overflowing)
    found = check_tokens(rounded, plain, [with_token(plain[0], 11, 5)], tie_noise=4.5)
    assert found.wrong_tokens[-1].position == 11
    assert found.wrong_tokens[-1].tolerance < 1


def test_noise_of_four_rounding_errors_is_found(rounded, draft, monkeypatch):
    decoding = GREEDY.model_copy(update={"max_new_tokens": 60, "batch_size": 4})
    requests = requests_for([[first, second, 9] for first in range(10, 18) for second in (5, 40)])
    plain, sound = (decode(rounded, requests, decoding, each)[0] for each in (None, draft))
    own, numbers = Verifier.target_tokens, torch.Generator().manual_seed(0)

    def noisy(verifier, logits_BKV, inputs):
        return own(verifier, logits_BKV + 0.02 * torch.randn(logits_BKV.shape, generator=numbers), inputs)

    monkeypatch.setattr(Verifier, "target_tokens", noisy)
    modes = {"sound": sound, "noisy": decode(rounded, requests, decoding, draft)[0]}
    readings = read_answers(rounded, [*plain, *modes["sound"], *modes["noisy"]])
    found = check_modes(readings, plain, modes, CHECKS.tie_noise)
    assert [found[name].is_right for name in ("autoregressive", "sound", "noisy")] == [True, True, False]
    assert found["sound"].divergences


def test_gaps_that_rounding_explains_one_by_one_are_too_many_together(plain):
    """200 sound runs of 16 answers, as plain decoding's gaps are spread, and 200 of a decoder with three times as many gaps."""
    generator, refused = np.random.default_rng(0), {2: 0, 6: 0}
    answers = [replace(plain[0], prompt_id=str(number)) for number in range(16)]
    others = [replace(answer, tokens=(0, *answer.tokens[1:])) for answer in answers]
    for _, percent in itertools.product(range(200), refused):
        readings = {}
        for answer, share in [*((each, 2) for each in answers), *((each, percent) for each in others)]:
            gap_T = np.abs(generator.normal(size=64)) * (generator.random(64) < share / 100)
            readings[answer_key(answer)] = Reading(gap_T, np.ones(64), 1.0)
        found = teacher_forcing._check(list(zip(answers, others, strict=True)), readings, tolerance=100.0)
        refused[percent] += not found.is_right
    assert refused[2] <= 4
    assert refused[6] >= 150


def test_a_wrong_token_of_a_lookup_is_found_beside_a_right_draft(target, plain):
    modes = {"speculative": plain, "prompt_lookup": [with_token(plain[0], 5, 5)]}
    section = judge_lossless(target, plain, modes, GREEDY, CHECKS, None)
    assert (section["verdict"], section["failed_checks"]) == ("not_lossless", ["greedy_prompt_lookup"])
    answers = [replace(plain[0], prompt_id=str(number)) for number in range(7)]
    few = judge_lossless(target, answers, {"speculative": answers}, GREEDY, LosslessConfig(num_answers=3), None)
    assert few["checked_prompts"] == 3


def test_a_wider_target_holds_one_blocks_weights_and_comes_back_as_it_was(rounded):
    before = {name: each.data_ptr() for name, each in rounded.model.state_dict().items()}
    layers, wide = rounded.model.model.layers, []
    watch = [layer.mlp.register_forward_pre_hook(lambda *_: wide.append([dtypes(each) for each in layers])) for layer in layers]
    ids = torch.tensor([[*PROMPT]])
    expected = copy.deepcopy(rounded.model).float()(input_ids=ids).logits
    del wide[:]
    with widened(rounded) as exact:
        assert torch.equal(exact.model(input_ids=ids).logits, expected)
    for hook in watch:
        hook.remove()
    assert wide == [
        [{torch.float32 if place == running else torch.bfloat16} for place in range(len(layers))]
        for running in range(len(layers))
    ]
    assert {name: each.data_ptr() for name, each in rounded.model.state_dict().items()} == before
    assert dtypes(rounded.model) == {torch.bfloat16}


def dtypes(module):
    return {each.dtype for each in module.parameters()}


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
    section = judged(target, answers, answers, decoding=LONG)
    assert section["verdict"] == "not_lossless"
    assert section["checks"]["greedy"]["first_wrong_tokens"][0]["position"] >= 26


@pytest.mark.parametrize("changes", [{"kv_cache": "int8"}, {"repetition_penalty": 1.2, "frequency_penalty": 0.3}], ids=str)
def test_what_changes_plain_decoding_too_is_read_as_it_was_decoded(target, draft, changes, monkeypatch):
    monkeypatch.setattr(teacher_forcing, "AT_ONCE", 30)
    plainly = GREEDY.model_copy(update={"max_new_tokens": 100})
    config = plainly.model_copy(update=changes)
    plain, speculative = (decode(target, requests_for(PROMPTS), config, each)[0] for each in (None, draft))
    assert verdict_of(target, plain, speculative, decoding=config) == "lossless"
    assert verdict_of(target, plain, speculative, decoding=plainly) == "not_lossless"

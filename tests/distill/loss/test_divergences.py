"""Each divergence and its gradient against a textbook's, its identities, extreme logits, and mixes by config."""

import math
from functools import partial
from typing import get_args

import pytest
import torch

from configs.schema.training import DivergenceName, DivergenceSettings, LossConfig
from distill.loss.divergences import (
    DIVERGENCES,
    acceptance,
    configured_divergence,
    cross_entropy,
    forward_kl,
    jsd,
    kl_tv_blend,
    make_pair,
    mixed,
    negative_log_acceptance,
    reverse_kl,
    total_variation,
)
from tests.support.losses import random_logits, textbook

VOCABULARY = 11
IDS_W = torch.tensor([7, 0, 3, 8, 2, 5])
LABELS = torch.tensor([0, 4, -100, 4, 2, 5, -1])
PLAIN = {name: divergence for name, divergence in DIVERGENCES.items() if name != "cross_entropy"}
OTHERS = {"jsd_0.1": ("jsd", {"beta": 0.1}), "blend_1": ("kl_tv_blend", {"eta": 1.0})}
CASES = {name: (name, {}) for name in DIVERGENCES} | OTHERS
EVERY = {name: partial(DIVERGENCES[of], **settings) for name, (of, settings) in CASES.items() if of != "cross_entropy"}
EVERY |= {"jsd_0": partial(jsd, beta=0.0), "jsd_1": partial(jsd, beta=1.0)}
every_one = pytest.mark.parametrize("divergence", EVERY.values(), ids=EVERY)


def by_autograd(name, target, draft, **options):
    leaf = draft.clone().requires_grad_()
    values = textbook(name, target, leaf, **options)
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), gradient


@pytest.mark.parametrize(("name", "settings"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("ids", [None, IDS_W], ids=["whole", "reduced"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_value_and_gradient_are_the_textbooks(name, settings, ids, temperature):
    target, draft = random_logits(1), random_logits(2, VOCABULARY if ids is None else len(ids))
    options = {"temperature": temperature, "token_ids_W": ids, "labels": LABELS}
    expected = by_autograd(name, target, draft, **options, **settings)
    assert expected[1].abs().max() > 1e-3
    found = DIVERGENCES[name](make_pair(target, draft, **options), **settings)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", PLAIN)
def test_half_precision_logits_are_compared_in_float32(name):
    target, draft = random_logits(1).bfloat16(), random_logits(2).bfloat16()
    values, _ = PLAIN[name](make_pair(target, draft))
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), textbook(name, target.double(), draft.double()), rtol=5e-6, atol=0)


@every_one
def test_a_divergence_is_zero_with_zero_gradient_where_draft_equals_target(divergence):
    for found in divergence(make_pair(random_logits(1), random_logits(1))):
        assert found.abs().max() < 1e-14


@every_one
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_and_masked_logits_leave_values_and_gradients_finite(divergence, dtype):
    # Opposite certainty, agreeing certainty, columns masked on both sides, on either side alone.
    big, inf = 1e4, math.inf
    target = [[big, -big, 0.0, 1.0], [big, -big, 0.0, 1.0], [1.0, -inf, 0.0, 2.0], [1.0, -inf, 0.0, 2.0], [1.0, 3.0, 0.0, 2.0]]
    draft = [[-big, big, 0.0, 1.0], [big, -big, 0.0, 1.0], [0.0, -inf, 0.5, 1.0], [0.0, 3.0, 0.5, 1.0], [0.0, -inf, 0.5, 1.0]]
    values, gradient = divergence(make_pair(torch.tensor(target, dtype=dtype), torch.tensor(draft, dtype=dtype)))
    assert torch.isfinite(values).all()
    assert torch.isfinite(gradient).all()
    assert values[1].abs() < 1e-6
    assert gradient[4, 1] == 0  # what the draft masks pulls at nothing


@every_one
def test_a_divergence_leaves_the_pair_as_it_was_for_the_next_reader(divergence):
    pair, untouched = (make_pair(random_logits(1), random_logits(2), token_ids_W=torch.arange(11)) for _ in range(2))
    divergence(pair)
    for name in ("p", "q", "log_p", "log_q"):
        assert torch.equal(getattr(pair, name), getattr(untouched, name))


def test_rescaled_jsd_runs_into_both_kls():
    pair = make_pair(random_logits(1), random_logits(2))
    for beta, kl in ((0, forward_kl), (1, reverse_kl)):
        assert all(torch.equal(one, other) for one, other in zip(jsd(pair, beta=beta), kl(pair), strict=True))
        torch.testing.assert_close(jsd(pair, beta=abs(beta - 1e-6))[0], kl(pair)[0], rtol=1e-4, atol=0)


def test_acceptance_is_one_minus_total_variation_and_what_rejection_sampling_keeps():
    pair = make_pair(random_logits(1), random_logits(2))
    kept = (pair.q * (pair.p / pair.q).clamp(max=1)).sum(-1)
    for expected in (1 - total_variation(pair)[0], torch.exp(-negative_log_acceptance(pair)[0]), kept):
        torch.testing.assert_close(acceptance(pair), expected, rtol=1e-13, atol=1e-15)


def test_log_acceptance_still_has_a_gradient_where_acceptance_underflows():
    pair = make_pair(torch.tensor([[200.0, 0.0]]), torch.tensor([[0.0, 200.0]]))
    assert acceptance(pair).item() == 0
    assert negative_log_acceptance(pair)[1][0, 0] < -0.4


# --- by config ----------------------------------------------------------------------------------------------------


def some_pair():
    return make_pair(random_logits(1), random_logits(2), labels=LABELS)


def test_a_config_names_every_divergence_there_is_with_the_defaults_that_it_has_itself():
    assert set(get_args(DivergenceName)) == set(DIVERGENCES)
    for name, divergence in DIVERGENCES.items():
        found = configured_divergence(LossConfig(divergence=name))(some_pair())
        assert all(torch.equal(one, other) for one, other in zip(found, divergence(some_pair()), strict=True))
    assert set(DivergenceSettings().model_dump()) <= set(DIVERGENCES)


def test_a_mix_adds_up_its_weighted_parts_with_their_settings():
    settings = {"jsd": {"beta": 0.1}, "kl_tv_blend": {"eta": 1.0}}
    config = LossConfig(divergence={"jsd": 2.0, "kl_tv_blend": 0.5, "cross_entropy": 0.3, "forward_kl": 0.0}, settings=settings)
    parts = [jsd(some_pair(), beta=0.1), kl_tv_blend(some_pair(), eta=1.0), cross_entropy(some_pair())]
    found = configured_divergence(config)(some_pair())
    for each, expected in zip(found, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(each, 2.0 * expected[0] + 0.5 * expected[1] + 0.3 * expected[2])
    alone = mixed([forward_kl], [0.5], some_pair())
    torch.testing.assert_close(alone[1], 0.5 * forward_kl(some_pair())[1])

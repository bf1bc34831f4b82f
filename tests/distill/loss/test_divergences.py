"""Each divergence and its closed form against a naive float64 reference, its identity, finite differences, extreme logits."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional

from configs.schema.training import LossConfig
from distill.loss.divergences import (
    CLOSED_FORMS,
    DIVERGENCES,
    acceptance,
    closed_form,
    configured_divergence,
    cross_entropy,
    forward_kl,
    jsd,
    kl_tv_blend,
    negative_log_acceptance,
    reverse_kl,
    total_variation,
)
from distill.loss.pairs import SparseTarget
from tests.support.losses import dense_pair, keep_top, random_logits

ROWS, VOCABULARY = 7, 11
MIX = LossConfig(mix={"forward_kl": 0.3, "jsd": 2.0, "total_variation": 0.5}, settings={"jsd": {"beta": 0.9}})
PLAIN = {name: divergence for name, divergence in DIVERGENCES.items() if name != "cross_entropy"}
WITH_A_FORM = PLAIN | {
    "jsd_0": partial(jsd, beta=0.0),
    "jsd_0.1": partial(jsd, beta=0.1),
    "jsd_1": partial(jsd, beta=1.0),
    "blend_1": partial(kl_tv_blend, eta=1.0),
    "mix": configured_divergence(MIX),
}
every_divergence = pytest.mark.parametrize("name", [*PLAIN, "jsd_0.1"])
every_form = pytest.mark.parametrize("divergence", WITH_A_FORM.values(), ids=WITH_A_FORM)


def softmax(row, temperature=1.0):
    powers = [math.exp(value / temperature) for value in row]
    return [power / sum(powers) for power in powers]


def naive_kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def naive_tv(p, q):
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def naive_jsd(p, q, beta):
    m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return (beta * naive_kl(p, m) + (1 - beta) * naive_kl(q, m)) / (beta * (1 - beta))


def naive_blend(p, q, temperature):
    weight = math.exp(-3.0 * (1 - naive_tv(p, q)))
    return weight * temperature**2 * naive_kl(p, q) + (1 - weight) * naive_tv(p, q)


NAIVE = {
    "forward_kl": lambda p, q, T: T**2 * naive_kl(p, q),
    "reverse_kl": lambda p, q, T: T**2 * naive_kl(q, p),
    "jsd": lambda p, q, T: T**2 * naive_jsd(p, q, 0.5),
    "jsd_0.1": lambda p, q, T: T**2 * naive_jsd(p, q, 0.1),
    "total_variation": lambda p, q, T: naive_tv(p, q),
    "negative_log_acceptance": lambda p, q, T: -math.log(1 - naive_tv(p, q)),
    "kl_tv_blend": naive_blend,
}


def naive_values(name, target_logits, draft_logits, temperature):
    return [
        NAIVE[name](softmax(target_row, temperature), softmax(draft_row, temperature), temperature)
        for target_row, draft_row in zip(target_logits.tolist(), draft_logits.tolist(), strict=True)
    ]


def by_autograd(divergence, target, draft, **options):
    leaf = draft.clone().requires_grad_()
    values = divergence(dense_pair(target, leaf, **options))
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), gradient


def by_form(divergence, target, draft, **options):
    return closed_form(divergence)(dense_pair(target, draft, **options))


@every_divergence
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_a_divergence_equals_its_definition_written_out(name, temperature):
    target, draft = random_logits(1), random_logits(2)
    values = WITH_A_FORM[name](dense_pair(target, draft, temperature=temperature))
    assert values.tolist() == pytest.approx(naive_values(name, target, draft, temperature), rel=1e-12)


@every_divergence
def test_half_precision_logits_are_compared_in_float32(name):
    target, draft = random_logits(1).bfloat16(), random_logits(2).bfloat16()
    values = WITH_A_FORM[name](dense_pair(target, draft))
    assert values.dtype == torch.float32
    assert values.tolist() == pytest.approx(naive_values(name, target, draft, 1.0), rel=5e-6)


@every_form
def test_a_divergence_is_zero_with_zero_gradient_where_draft_equals_target(divergence):
    for way in (by_autograd, by_form):
        for found in way(divergence, random_logits(1), random_logits(1)):
            assert found.abs().max() < 1e-14


@every_form
@pytest.mark.parametrize("ids", [None, torch.tensor([7, 0, 3, 8, 2, 5])], ids=["whole", "reduced"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_a_closed_form_gives_the_value_and_the_gradient_that_autograd_gives(divergence, ids, temperature):
    target, draft = random_logits(1), random_logits(2, VOCABULARY if ids is None else len(ids))
    options = {"temperature": temperature, "draft_token_ids_W": ids}
    expected = by_autograd(divergence, target, draft, **options)
    assert expected[1].abs().max() > 1e-3
    torch.testing.assert_close(by_form(divergence, target, draft, **options), expected, rtol=1e-12, atol=1e-14)


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_and_masked_logits_leave_values_and_gradients_finite(divergence, dtype):
    # Opposite certainty, agreeing certainty, columns masked on both sides, on either side alone.
    big, inf = 1e4, math.inf
    target = [[big, -big, 0.0, 1.0], [big, -big, 0.0, 1.0], [1.0, -inf, 0.0, 2.0], [1.0, -inf, 0.0, 2.0], [1.0, 3.0, 0.0, 2.0]]
    draft = [[-big, big, 0.0, 1.0], [big, -big, 0.0, 1.0], [0.0, -inf, 0.5, 1.0], [0.0, 3.0, 0.5, 1.0], [0.0, -inf, 0.5, 1.0]]
    rows = torch.tensor(target, dtype=dtype), torch.tensor(draft, dtype=dtype)
    found = by_form(divergence, *rows)
    assert all(torch.isfinite(each).all() for each in found)
    assert found[0][1].abs() < 1e-6
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, by_autograd(divergence, *rows), rtol=tolerance, atol=tolerance)


@every_form
def test_a_closed_form_leaves_the_pair_as_it_was_for_the_next_reader(divergence):
    pair, untouched = (dense_pair(random_logits(1), random_logits(2)) for _ in range(2))
    closed_form(divergence)(pair)
    for name in ("p", "q", "log_p", "log_q"):
        assert torch.equal(getattr(pair, name), getattr(untouched, name))


def test_every_divergence_but_cross_entropy_has_a_closed_form():
    def own(pair):
        return forward_kl(pair)

    assert set(DIVERGENCES.values()) - set(CLOSED_FORMS) == {cross_entropy}
    with_labels = configured_divergence(LossConfig(mix={"forward_kl": 1.0, "cross_entropy": 0.1}))
    assert [closed_form(each) for each in (cross_entropy, with_labels, own, partial(own))] == [None] * 4


def test_rescaled_jsd_runs_into_both_kls():
    pair = dense_pair(random_logits(1), random_logits(2))
    for beta, kl in ((0, forward_kl), (1, reverse_kl)):
        assert torch.equal(jsd(pair, beta=beta), kl(pair))
        torch.testing.assert_close(jsd(pair, beta=abs(beta - 1e-6)), kl(pair), rtol=1e-4, atol=0)


def test_acceptance_is_one_minus_total_variation_and_what_rejection_sampling_keeps():
    pair = dense_pair(random_logits(1), random_logits(2))
    kept = (pair.q * (pair.p / pair.q).clamp(max=1)).sum(-1)
    for expected in (1 - total_variation(pair), torch.exp(-negative_log_acceptance(pair)), kept):
        torch.testing.assert_close(acceptance(pair), expected, rtol=1e-13, atol=1e-15)


def test_no_gradient_flows_into_the_target():
    target = random_logits(1).requires_grad_()
    assert not dense_pair(target, random_logits(2)).log_p.requires_grad
    assert not keep_top(target, 3).pair(random_logits(2), temperature=1.0).log_p.requires_grad


def test_log_acceptance_still_has_a_gradient_where_acceptance_underflows():
    target, draft = torch.tensor([[200.0, 0.0]]), torch.tensor([[0.0, 200.0]], requires_grad=True)
    pair = dense_pair(target, draft)
    (gradient,) = torch.autograd.grad(negative_log_acceptance(pair).sum(), draft)
    assert acceptance(pair).item() == 0
    assert gradient[0, 0] < -0.4


def test_sides_that_cannot_be_paired_are_refused():
    with pytest.raises(ValueError, match="the draft has 6 logits a position where 11 are expected"):
        dense_pair(random_logits(1), random_logits(3, 6))


# --- sparse targets and labels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_the_tail_is_one_more_bucket_on_both_sides(name):
    target, draft = random_logits(1), random_logits(2)
    expected = []
    for target_row, draft_row in zip(target.tolist(), draft.tolist(), strict=True):
        p, q = softmax(target_row), softmax(draft_row)
        kept = sorted(range(VOCABULARY), key=lambda token: -p[token])[:3]
        merged = [[side[token] for token in kept] + [1 - sum(side[token] for token in kept)] for side in (p, q)]
        expected.append(NAIVE[name](*merged, 1.0))
    assert PLAIN[name](keep_top(target, 3).pair(draft, temperature=1.0)).tolist() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", PLAIN)
def test_a_sparse_target_stored_in_half_precision_still_gives_no_negative_divergence(name):
    target = keep_top(random_logits(1), 4)
    stored = SparseTarget(log_probs=target.log_probs.half(), token_ids=target.token_ids, log_tail=target.log_tail.half())
    values = PLAIN[name](stored.pair(random_logits(1).float(), temperature=1.0))
    assert (values >= -1e-6).all()
    assert (values < 2e-3).all()


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_cross_entropy_reads_the_label_at_temperature_one_and_skips_missing_labels(temperature):
    draft, labels = random_logits(2).requires_grad_(), torch.tensor([0, 8, -100, 4, 4, 10, -1])
    dense = cross_entropy(dense_pair(random_logits(1), draft, temperature=temperature, labels=labels))
    sparse = cross_entropy(keep_top(random_logits(1), 2).pair(draft, temperature=1.0, labels=labels))
    expected = functional.cross_entropy(draft, labels.clamp(min=-1), reduction="none", ignore_index=-1)
    torch.testing.assert_close(dense, expected)
    torch.testing.assert_close(sparse, expected)
    torch.testing.assert_close(torch.autograd.grad(dense.sum(), draft), torch.autograd.grad(expected.sum(), draft))
    with pytest.raises(ValueError, match="needs labels"):
        cross_entropy(dense_pair(random_logits(1), draft))

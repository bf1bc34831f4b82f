"""Each divergence against a naive float64 reference, its identity, its gradient, finite differences and extreme logits."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from configs.runtime.errors import InputError
from distill.loss.divergences import (
    DIVERGENCES,
    acceptance,
    cross_entropy,
    forward_kl,
    jsd,
    kl_tv_blend,
    mix,
    negative_log_acceptance,
    reverse_kl,
    total_variation,
)
from distill.loss.pairs import LOG_ZERO, Pair, SparseTarget, dense_pair, sparse_pair
from tests.support.losses import keep_top

WITHOUT_LABELS = [name for name in DIVERGENCES if name != "cross_entropy"]
ROWS, VOCABULARY = 5, 9


def random_logits(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*(shape or (ROWS, VOCABULARY)), generator=generator, dtype=torch.float64)


def softmax(row: list[float], temperature: float = 1.0) -> list[float]:
    powers = [math.exp(value / temperature) for value in row]
    return [power / sum(powers) for power in powers]


def naive_kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def naive_tv(p: list[float], q: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def naive_jsd(p: list[float], q: list[float], beta: float) -> float:
    m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * naive_kl(p, m) + (1 - beta) * naive_kl(q, m)


def naive_blend(p: list[float], q: list[float], temperature: float) -> float:
    weight = math.exp(-3.0 * (1 - naive_tv(p, q)))
    return weight * temperature**2 * naive_kl(p, q) + (1 - weight) * naive_tv(p, q)


NAIVE = {
    "forward_kl": lambda p, q, T: T**2 * naive_kl(p, q),
    "reverse_kl": lambda p, q, T: T**2 * naive_kl(q, p),
    "jsd": lambda p, q, T: T**2 * 4 * naive_jsd(p, q, 0.5),
    "total_variation": lambda p, q, T: naive_tv(p, q),
    "negative_log_acceptance": lambda p, q, T: -math.log(1 - naive_tv(p, q)),
    "kl_tv_blend": naive_blend,
}


def naive_values(name: str, target_logits: Tensor, draft_logits: Tensor, temperature: float) -> list[float]:
    return [
        NAIVE[name](softmax(target_row, temperature), softmax(draft_row, temperature), temperature)
        for target_row, draft_row in zip(target_logits.tolist(), draft_logits.tolist(), strict=True)
    ]


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("name", WITHOUT_LABELS)
def test_a_divergence_equals_its_definition_written_out(name: str, temperature: float) -> None:
    target, draft = random_logits(1), random_logits(2)
    values = DIVERGENCES[name](dense_pair(target, draft, temperature=temperature))
    assert values.tolist() == pytest.approx(naive_values(name, target, draft, temperature), rel=1e-12)


@pytest.mark.parametrize("name", WITHOUT_LABELS)
def test_half_precision_logits_are_compared_in_float32(name: str) -> None:
    target, draft = random_logits(1).bfloat16(), random_logits(2).bfloat16()
    values = DIVERGENCES[name](dense_pair(target, draft))
    assert values.dtype == torch.float32
    assert values.tolist() == pytest.approx(naive_values(name, target, draft, 1.0), rel=2e-6)


@pytest.mark.parametrize("name", WITHOUT_LABELS)
def test_a_divergence_is_zero_with_zero_gradient_where_draft_equals_target(name: str) -> None:
    draft = random_logits(1).requires_grad_()
    values = DIVERGENCES[name](dense_pair(random_logits(1), draft))
    (gradient,) = torch.autograd.grad(values.sum(), draft)
    assert values.abs().max() < 1e-14
    assert gradient.abs().max() < 1e-14


@pytest.mark.parametrize("name", WITHOUT_LABELS)
def test_a_constant_added_to_all_logits_of_a_row_changes_nothing(name: str) -> None:
    target, draft = random_logits(1), random_logits(2)
    shifted = dense_pair(target + 300.0, draft - 70.0)
    torch.testing.assert_close(DIVERGENCES[name](shifted), DIVERGENCES[name](dense_pair(target, draft)), rtol=1e-11, atol=0)


@pytest.mark.parametrize("name", WITHOUT_LABELS)
def test_a_divergence_is_positive_where_draft_differs(name: str) -> None:
    assert (DIVERGENCES[name](dense_pair(random_logits(1), random_logits(2))) > 0.01).all()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_gradient_of_forward_kl_is_temperature_times_q_minus_p(temperature: float) -> None:
    draft = random_logits(2).requires_grad_()
    pair = dense_pair(random_logits(1), draft, temperature=temperature)
    (gradient,) = torch.autograd.grad(forward_kl(pair).sum(), draft)
    torch.testing.assert_close(gradient, temperature * (pair.q - pair.p), rtol=1e-12, atol=1e-14)


def test_the_gradients_of_reverse_kl_total_variation_and_log_acceptance_are_the_published_ones() -> None:
    draft = random_logits(2).requires_grad_()
    pair = dense_pair(random_logits(1), draft)
    q, log_ratio, sign = pair.q.detach(), (pair.log_q - pair.log_p).detach(), (pair.q - pair.p).detach().sign()
    of_reverse_kl = q * (log_ratio - reverse_kl(pair).unsqueeze(-1).detach())
    of_tv = q * (sign - (q * sign).sum(-1, keepdim=True)) / 2
    expected = {
        reverse_kl: of_reverse_kl,
        total_variation: of_tv,
        negative_log_acceptance: of_tv / acceptance(pair).unsqueeze(-1).detach(),
    }
    for divergence, published in expected.items():
        (gradient,) = torch.autograd.grad(divergence(pair).sum(), draft, retain_graph=True)
        torch.testing.assert_close(gradient, published, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("num_drafted", [VOCABULARY, 6])
@pytest.mark.parametrize("name", [*WITHOUT_LABELS, "jsd_0.1"])
def test_gradients_equal_finite_differences(name: str, num_drafted: int) -> None:
    divergence = partial(jsd, beta=0.1) if name == "jsd_0.1" else DIVERGENCES[name]
    if name == "kl_tv_blend":  # its own weight is detached, which finite differences would see
        divergence = partial(kl_tv_blend, mean_acceptance=0.4)
    target, ids = random_logits(1), torch.arange(num_drafted)
    draft = random_logits(2)[:, :num_drafted].clone().requires_grad_()

    def values(logits: Tensor) -> Tensor:
        return divergence(dense_pair(target, logits, temperature=1.5, draft_token_ids_W=ids))

    assert torch.autograd.gradcheck(values, (draft,))


def test_rescaled_jsd_runs_into_both_kls() -> None:
    pair = dense_pair(random_logits(1), random_logits(2))
    torch.testing.assert_close(jsd(pair, beta=1e-6), forward_kl(pair), rtol=1e-4, atol=0)
    torch.testing.assert_close(jsd(pair, beta=1 - 1e-6), reverse_kl(pair), rtol=1e-4, atol=0)
    assert torch.equal(jsd(pair, beta=0), forward_kl(pair))
    assert torch.equal(jsd(pair, beta=1), reverse_kl(pair))


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.8])
def test_jsd_between_the_ends_is_the_textbook_one_rescaled(beta: float) -> None:
    target, draft = random_logits(1), random_logits(2)
    rows = zip(target.tolist(), draft.tolist(), strict=True)
    expected = [naive_jsd(softmax(p), softmax(q), beta) / (beta * (1 - beta)) for p, q in rows]
    assert jsd(dense_pair(target, draft), beta=beta).tolist() == pytest.approx(expected, rel=1e-12)


def test_a_beta_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"beta must lie in 0..1, got 1.5"):
        jsd(dense_pair(random_logits(1), random_logits(2)), beta=1.5)


def test_acceptance_is_one_minus_total_variation() -> None:
    pair = dense_pair(random_logits(1), random_logits(2))
    torch.testing.assert_close(acceptance(pair), 1 - total_variation(pair), rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(acceptance(pair), torch.exp(-negative_log_acceptance(pair)), rtol=1e-13, atol=0)


def test_acceptance_equals_the_share_of_draft_tokens_that_rejection_sampling_keeps() -> None:
    pair = dense_pair(random_logits(1), random_logits(2))
    kept = (pair.q * (pair.p / pair.q).clamp(max=1)).sum(-1)
    torch.testing.assert_close(acceptance(pair), kept, rtol=1e-13, atol=0)


def test_the_blend_moves_from_kl_to_total_variation_as_acceptance_grows() -> None:
    pair = dense_pair(random_logits(1), random_logits(2))
    torch.testing.assert_close(kl_tv_blend(pair, mean_acceptance=0.0), forward_kl(pair))
    torch.testing.assert_close(kl_tv_blend(pair, eta=500.0, mean_acceptance=torch.tensor(1.0)), total_variation(pair))
    torch.testing.assert_close(kl_tv_blend(pair, eta=0.0), forward_kl(pair))


def test_the_blend_does_not_learn_through_its_own_weight() -> None:
    draft = random_logits(2).requires_grad_()
    pair = dense_pair(random_logits(1), draft)
    fixed = kl_tv_blend(pair, mean_acceptance=acceptance(pair).detach())
    (expected,) = torch.autograd.grad(fixed.sum(), draft, retain_graph=True)
    (found,) = torch.autograd.grad(kl_tv_blend(pair).sum(), draft)
    torch.testing.assert_close(found, expected)


def test_no_gradient_flows_into_the_target() -> None:
    target = random_logits(1).requires_grad_()
    sparse = sparse_pair(keep_top(target, 3), random_logits(2))
    assert not dense_pair(target, random_logits(2)).log_p.requires_grad
    assert not sparse.log_p.requires_grad


# --- extreme logits -----------------------------------------------------------------------------------------------


def extreme_logits() -> tuple[Tensor, Tensor]:
    """Rows of float32 logits: opposite certainty, agreeing certainty, columns masked on both sides, on either side alone."""
    big, inf = 1e4, math.inf
    target = [[big, -big, 0.0, 1.0], [big, -big, 0.0, 1.0], [1.0, -inf, 0.0, 2.0], [1.0, -inf, 0.0, 2.0], [1.0, 3.0, 0.0, 2.0]]
    draft = [[-big, big, 0.0, 1.0], [big, -big, 0.0, 1.0], [0.0, -inf, 0.5, 1.0], [0.0, 3.0, 0.5, 1.0], [0.0, -inf, 0.5, 1.0]]
    return torch.tensor(target), torch.tensor(draft)


@pytest.mark.parametrize("name", [*WITHOUT_LABELS, "jsd_0.1"])
def test_extreme_and_masked_logits_leave_values_and_gradients_finite(name: str) -> None:
    divergence = partial(jsd, beta=0.1) if name == "jsd_0.1" else DIVERGENCES[name]
    target, draft = extreme_logits()
    draft.requires_grad_()
    values = divergence(dense_pair(target, draft))
    (gradient,) = torch.autograd.grad(values.sum(), draft)
    assert torch.isfinite(values).all()
    assert torch.isfinite(gradient).all()
    assert values[1].abs() < 1e-6


def test_log_acceptance_still_has_a_gradient_where_acceptance_underflows() -> None:
    target, draft = torch.tensor([[200.0, 0.0]]), torch.tensor([[0.0, 200.0]], requires_grad=True)
    pair = dense_pair(target, draft)
    (gradient,) = torch.autograd.grad(negative_log_acceptance(pair).sum(), draft)
    assert acceptance(pair).item() == 0
    assert gradient[0, 0] < -0.4


def test_a_column_masked_on_both_sides_changes_nothing() -> None:
    target, draft = random_logits(1), random_logits(2)
    hole = torch.full((ROWS, 1), -math.inf, dtype=torch.float64)
    masked = dense_pair(torch.cat([target, hole], -1), torch.cat([draft, hole], -1))
    for name in WITHOUT_LABELS:
        torch.testing.assert_close(DIVERGENCES[name](masked), DIVERGENCES[name](dense_pair(target, draft)))


# --- reduced draft vocabulary -------------------------------------------------------------------------------------


@pytest.fixture
def reduced() -> tuple[Pair, Tensor, Tensor, Tensor]:
    """A pair with six of nine tokens in the draft's vocabulary, and p, q, both over all nine, and the six ids."""
    target, draft, ids = random_logits(1), random_logits(3, ROWS, 6), torch.tensor([7, 0, 3, 8, 2, 5])
    q = torch.zeros(ROWS, VOCABULARY, dtype=torch.float64)
    q[:, ids] = draft.softmax(-1)
    return dense_pair(target, draft, draft_token_ids_W=ids), target.softmax(-1), q, ids


def test_target_mass_outside_the_draft_vocabulary_counts_as_rejected(reduced: tuple[Pair, Tensor, Tensor, Tensor]) -> None:
    pair, p, q, _ = reduced
    torch.testing.assert_close(acceptance(pair), torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(total_variation(pair), (p - q).abs().sum(-1) / 2)
    torch.testing.assert_close(negative_log_acceptance(pair), -torch.minimum(p, q).sum(-1).log())


def test_kl_over_a_reduced_vocabulary_takes_the_target_renormalised(reduced: tuple[Pair, Tensor, Tensor, Tensor]) -> None:
    pair, p, q, ids = reduced
    within, q = p[:, ids] / p[:, ids].sum(-1, keepdim=True), q[:, ids]
    torch.testing.assert_close(forward_kl(pair), (within * (within / q).log()).sum(-1))
    torch.testing.assert_close(reverse_kl(pair), (q * (q / within).log()).sum(-1))


def test_the_first_rows_of_a_padded_vocabulary_are_a_reduced_vocabulary() -> None:
    target, draft = random_logits(1), random_logits(2)
    padded = torch.cat([target, torch.full((ROWS, 3), -1e4, dtype=torch.float64)], -1)
    trimmed = dense_pair(padded, draft, draft_token_ids_W=torch.arange(VOCABULARY))
    torch.testing.assert_close(forward_kl(trimmed), forward_kl(dense_pair(target, draft)))


def test_sides_of_different_width_are_refused() -> None:
    with pytest.raises(ValueError, match="the draft has 6 logits a position where 9 are expected"):
        dense_pair(random_logits(1), random_logits(3, ROWS, 6))


def test_a_temperature_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        dense_pair(random_logits(1), random_logits(2), temperature=0)


# --- sparse targets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITHOUT_LABELS)
def test_a_sparse_target_that_keeps_every_token_is_the_dense_one(name: str) -> None:
    target, draft = random_logits(1), random_logits(2).requires_grad_()
    divergence = DIVERGENCES[name]
    dense, sparse = (
        divergence(dense_pair(target, draft, temperature=2.0)),
        divergence(sparse_pair(keep_top(target, VOCABULARY, 2.0), draft)),
    )
    torch.testing.assert_close(sparse, dense)
    torch.testing.assert_close(torch.autograd.grad(sparse.sum(), draft), torch.autograd.grad(dense.sum(), draft))


@pytest.mark.parametrize("name", WITHOUT_LABELS)
def test_the_tail_is_one_more_bucket_on_both_sides(name: str) -> None:
    target, draft = random_logits(1), random_logits(2)
    expected = []
    for target_row, draft_row in zip(target.tolist(), draft.tolist(), strict=True):
        p, q = softmax(target_row), softmax(draft_row)
        kept = sorted(range(VOCABULARY), key=lambda token: -p[token])[:3]
        merged = [[side[token] for token in kept] + [1 - sum(side[token] for token in kept)] for side in (p, q)]
        expected.append(NAIVE[name](*merged, 1.0))
    assert DIVERGENCES[name](sparse_pair(keep_top(target, 3), draft)).tolist() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", WITHOUT_LABELS)
def test_a_sparse_target_stored_in_half_precision_still_gives_no_negative_divergence(name: str) -> None:
    target = keep_top(random_logits(1), 4)
    stored = SparseTarget(log_probs=target.log_probs.half(), token_ids=target.token_ids, log_tail=target.log_tail.half())
    values = DIVERGENCES[name](sparse_pair(stored, random_logits(1).float()))
    assert (values >= -1e-6).all()
    assert (values < 2e-3).all()


def test_gradients_through_a_sparse_pair_equal_finite_differences() -> None:
    target, draft = keep_top(random_logits(1), 3), random_logits(2).requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: jsd(sparse_pair(target, logits)), (draft,))


def test_one_token_without_its_tail_could_teach_nothing_and_with_it_does() -> None:
    draft = random_logits(2).requires_grad_()
    (gradient,) = torch.autograd.grad(forward_kl(sparse_pair(keep_top(random_logits(1), 1), draft)).sum(), draft)
    assert (gradient.abs().amax(-1) > 1e-3).all()


# --- labels and mixes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_cross_entropy_reads_the_label_at_temperature_one_and_skips_missing_labels(temperature: float) -> None:
    draft, labels = random_logits(2).requires_grad_(), torch.tensor([0, 8, -100, 4, 4])
    dense = cross_entropy(dense_pair(random_logits(1), draft, temperature=temperature, labels=labels))
    sparse = cross_entropy(sparse_pair(keep_top(random_logits(1), 2), draft, labels=labels))
    expected = torch.nn.functional.cross_entropy(draft, labels, reduction="none", ignore_index=-100)
    torch.testing.assert_close(dense, expected)
    torch.testing.assert_close(sparse, expected)
    torch.testing.assert_close(torch.autograd.grad(dense.sum(), draft), torch.autograd.grad(expected.sum(), draft))


def test_cross_entropy_without_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="needs labels"):
        cross_entropy(dense_pair(random_logits(1), random_logits(2)))


def test_a_mix_is_the_weighted_sum_of_its_parts() -> None:
    pair = dense_pair(random_logits(1), random_logits(2), temperature=2.0)
    mixed = mix({"forward_kl": 0.25, "total_variation": 3.0, "jsd": 0.5, "reverse_kl": 0.0}, {"jsd": {"beta": 0.1}})
    expected = 0.25 * forward_kl(pair) + 3.0 * total_variation(pair) + 0.5 * jsd(pair, beta=0.1)
    torch.testing.assert_close(mixed(pair), expected)


@pytest.mark.parametrize(
    ("weights", "settings", "complaint"),
    [
        ({"forwardkl": 1.0}, {}, "unknown divergence 'forwardkl'; known are forward_kl"),
        ({"jsd": -1.0}, {}, "weight of jsd must be a finite number of at least 0, got -1.0"),
        ({"jsd": math.nan}, {}, "got nan"),
        ({"jsd": 0.0}, {}, "at least one weight must be above 0"),
        ({}, {}, "at least one weight must be above 0"),
        ({"forward_kl": 1.0}, {"jsd": {"beta": 0.1}}, "settings for jsd, which the mix does not hold"),
    ],
)
def test_a_mix_that_makes_no_sense_is_refused(weights: dict, settings: dict, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        mix(weights, settings)


def test_the_stand_in_for_log_zero_lies_below_anything_extreme_logits_reach() -> None:
    target, draft = extreme_logits()
    pair = dense_pair(target[:2], draft[:2])
    assert min(pair.log_p.min(), pair.log_q.min()) > LOG_ZERO / 2

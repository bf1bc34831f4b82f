"""Each closed form against autograd through the divergence it belongs to: values and gradients, also at the edges."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from distill.loss.divergences import DIVERGENCES, Divergence, Pair, cross_entropy, dense_pair, forward_kl, jsd, kl_tv_blend, mix
from distill.loss.gradients import CLOSED_FORMS, closed_form

ROWS, VOCABULARY = 5, 9
DIVERGENCES_WITH_A_FORM: dict[str, Divergence] = {
    **{name: divergence for name, divergence in DIVERGENCES.items() if name != "cross_entropy"},
    "jsd_0": partial(jsd, beta=0.0),
    "jsd_0.1": partial(jsd, beta=0.1),
    "jsd_1": partial(jsd, beta=1.0),
    "blend_of_a_mean": partial(kl_tv_blend, eta=1.0, mean_acceptance=torch.tensor(0.3, dtype=torch.float64)),
    "mix": mix({"forward_kl": 0.3, "jsd": 2.0, "total_variation": 0.5}, {"jsd": {"beta": 0.9}}),
}
every_form = pytest.mark.parametrize("name", DIVERGENCES_WITH_A_FORM)


def random_logits(seed: int, columns: int = VOCABULARY) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(ROWS, columns, generator=generator, dtype=torch.float64)


def by_autograd(divergence: Divergence, target: Tensor, draft: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    leaf = draft.clone().requires_grad_()
    values = divergence(dense_pair(target, leaf, **options))
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), gradient


def by_form(divergence: Divergence, target: Tensor, draft: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    form = closed_form(divergence)
    assert form is not None
    return form(dense_pair(target, draft, **options))


@every_form
@pytest.mark.parametrize("ids", [None, torch.tensor([7, 0, 3, 8, 2, 5])], ids=["whole", "reduced"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_it_gives_the_value_and_the_gradient_that_autograd_gives(name: str, ids: Tensor | None, temperature: float) -> None:
    target, draft = random_logits(1), random_logits(2, VOCABULARY if ids is None else len(ids))
    options = {"temperature": temperature, "draft_token_ids_W": ids}
    expected = by_autograd(DIVERGENCES_WITH_A_FORM[name], target, draft, **options)
    found = by_form(DIVERGENCES_WITH_A_FORM[name], target, draft, **options)
    assert expected[1].abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@every_form
def test_in_float32_it_is_as_near_to_float64_as_autograd_is(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    target, draft = (3 * torch.randn(3, 5000, generator=generator) for _ in range(2))
    divergence = DIVERGENCES_WITH_A_FORM[name]
    exact = by_autograd(divergence, target.double(), draft.double())
    values, gradient = by_form(divergence, target, draft)
    assert values.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(values.double(), exact[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.double(), exact[1], rtol=1e-5, atol=1e-5 * exact[1].abs().max().item())


@every_form
def test_the_gradient_is_zero_where_draft_equals_target(name: str) -> None:
    values, gradient = by_form(DIVERGENCES_WITH_A_FORM[name], random_logits(1), random_logits(1))
    assert values.abs().max() < 1e-14
    assert gradient.abs().max() < 1e-14


@every_form
def test_masked_and_extreme_logits_give_what_autograd_gives_and_nothing_infinite(name: str) -> None:
    big, inf = 1e4, math.inf
    target = [[big, -big, 0.0, 1.0], [1.0, -inf, 0.0, 2.0], [1.0, -inf, 0.0, 2.0], [1.0, 3.0, 0.0, 2.0]]
    draft = [[-big, big, 0.0, 1.0], [0.0, -inf, 0.5, 1.0], [0.0, 3.0, 0.5, 1.0], [0.0, -inf, 0.5, 1.0]]
    rows = torch.tensor(target, dtype=torch.float64), torch.tensor(draft, dtype=torch.float64)
    found = by_form(DIVERGENCES_WITH_A_FORM[name], *rows)
    assert torch.isfinite(found[0]).all()
    assert torch.isfinite(found[1]).all()
    torch.testing.assert_close(found, by_autograd(DIVERGENCES_WITH_A_FORM[name], *rows), rtol=1e-9, atol=1e-9)


@every_form
def test_the_pair_is_left_as_it_was_for_the_next_reader(name: str) -> None:
    pair, untouched = (dense_pair(random_logits(1), random_logits(2)) for _ in range(2))
    form = closed_form(DIVERGENCES_WITH_A_FORM[name])
    assert form is not None
    form(pair)
    for ours, theirs in ((pair.p, untouched.p), (pair.q, untouched.q), (pair.log_p, untouched.log_p)):
        assert torch.equal(ours, theirs)
    assert torch.equal(pair.log_q, untouched.log_q)


def test_every_divergence_but_cross_entropy_has_one() -> None:
    assert set(DIVERGENCES.values()) - set(CLOSED_FORMS) == {cross_entropy}


def test_there_is_none_for_cross_entropy_a_mix_with_it_or_a_function_of_one_s_own() -> None:
    def own(pair: Pair) -> Tensor:
        return forward_kl(pair)

    assert closed_form(cross_entropy) is None
    assert closed_form(mix({"forward_kl": 1.0, "cross_entropy": 0.1})) is None
    assert closed_form(own) is None
    assert closed_form(partial(own)) is None

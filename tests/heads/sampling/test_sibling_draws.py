"""Candidates are drawn by the distributions that the rules for them suppose."""

import pytest
import torch

from heads.sampling.probabilities import draw, draw_with_replacement
from heads.sampling.sibling_draws import draw_without_replacement

STEPS = 400


def pair_shares(draw_pair, distribution):
    """Give the share `[V, V]` of each ordered pair over a fine grid of both uniforms."""
    steps = (torch.arange(STEPS, dtype=torch.float64) + 0.5) / STEPS
    uniforms = torch.cartesian_prod(steps, steps)
    first, second = draw_pair(distribution.expand(len(uniforms), -1), uniforms).T
    counts = torch.bincount(first * len(distribution) + second, minlength=len(distribution) ** 2)
    return counts.reshape(len(distribution), -1) / len(uniforms)


PROBABILITIES = torch.tensor([0.5, 0.0, 0.2, 0.3], dtype=torch.float64)


def test_draws_with_replacement_are_independent():
    assert (pair_shares(draw_with_replacement, PROBABILITIES) - PROBABILITIES.outer(PROBABILITIES)).abs().max() < 2 / STEPS


def test_draws_without_replacement_follow_the_distribution_without_what_was_drawn_renormalised():
    exact = PROBABILITIES.outer(PROBABILITIES) / (1 - PROBABILITIES).unsqueeze(1)
    exact.fill_diagonal_(0)
    assert (pair_shares(draw_without_replacement, PROBABILITIES) - exact).abs().max() < 2 / STEPS


def test_a_distribution_need_not_be_normalised():
    uniforms = torch.rand(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for function in (draw_with_replacement, draw_without_replacement):
        assert torch.equal(
            function(PROBABILITIES.expand(50, -1), uniforms), function(7 * PROBABILITIES.expand(50, -1), uniforms)
        )


def test_draws_without_replacement_are_distinct_while_tokens_are_left():
    uniforms = torch.rand(200, 4, generator=torch.Generator().manual_seed(0))
    drawn = draw_without_replacement(PROBABILITIES.expand(200, -1), uniforms)
    assert all(set(row[:3]) == {0, 2, 3} for row in drawn.tolist())
    assert bool(((drawn >= 0) & (drawn < 4)).all())


def test_the_first_candidate_is_the_draw_of_a_chain():
    distributions = torch.rand(100, 7, generator=torch.Generator().manual_seed(0)).softmax(-1)
    uniforms = torch.rand(100, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = draw(distributions, uniforms[:, 0])
    for function in (draw_with_replacement, draw_without_replacement):
        assert torch.equal(function(distributions, uniforms)[:, 0], expected)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_a_token_of_weight_0_is_never_drawn(uniform):
    distribution = torch.tensor([[0.0, 0.4, 0.6, 0.0]])
    for function in (draw_with_replacement, draw_without_replacement):
        assert set(function(distribution, torch.full((1, 2), uniform, dtype=torch.float64))[0].tolist()) <= {1, 2}

"""Tokens are drawn from the distribution by numbers that are uniform and uncorrelated; trees are what their settings say."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from configs.schema.decoding import SamplingConfig, StaticTree, TreeConfig
from heads.sampling.draws import (
    CounterRNG,
    Role,
    draw,
    draw_with_replacement,
    draw_without_replacement,
    greedy_token,
    token_probabilities,
)
from heads.sampling.token_tree import DynamicTreeSpec, Tree, tree_from
from tests.support.distribution_checks import naive_distribution


@pytest.mark.parametrize(
    ("shape", "temperature", "cuts"),
    [
        ((6, 12), 1.0, {}),
        ((6, 12), 0.5, {"top_k": 3}),
        ((6, 12), 1.3, {"top_p": 0.7}),
        ((6, 12), 0.9, {"top_k": 5, "top_p": 0.6}),
        ((6, 12), 1.1, {"top_p": 0.8, "min_p": 0.3}),
        ((1, 3), 1.0, {"top_k": 99, "top_p": 1e-9}),
        ((2, 3000), 5.0, {"top_p": 0.9}),  # most tokens are in the nucleus; in the next case, few
        ((2, 3000), 0.2, {"top_p": 0.9}),
    ],
)
def test_the_distribution_is_the_naive_one(shape, temperature, cuts):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    distribution = token_probabilities(logits, SamplingConfig(temperature=temperature, **cuts))
    expected = torch.tensor([naive_distribution(row, temperature, **cuts) for row in logits.tolist()])
    assert torch.equal(distribution > 0, expected > 0)
    torch.testing.assert_close(distribution, expected.float(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [999, 1024])  # the second is a number of whole blocks
def test_the_likeliest_token_is_the_first_of_those_that_tie_and_a_nan_shows(dtype, size):
    logits = torch.randint(-300, 301, (50, 3, size), generator=torch.Generator().manual_seed(0)).to(dtype)
    first = torch.tensor([[row.index(max(row)) for row in rows] for rows in logits.tolist()])
    assert torch.equal(greedy_token(logits), first)
    logits[0, 1, 777] = float("nan")
    assert greedy_token(logits)[0, 1] == 777


@pytest.mark.parametrize("size", [6, 3000])
def test_a_nucleus_keeps_all_tokens_that_tie_with_its_last_one_wherever_they_stand(size):
    logits = torch.full((1, size), -40.0)
    logits[0, :6] = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0, 0.0])
    distribution = token_probabilities(logits, SamplingConfig(temperature=1.0, top_p=0.8))
    assert (distribution[0] > 0).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    assert distribution[0, 0] == distribution[0, 2] == distribution[0, 4]
    turned = token_probabilities(logits.flip(1), SamplingConfig(temperature=1.0, top_p=0.8))
    assert torch.equal(turned > 0, distribution.flip(1) > 0)
    torch.testing.assert_close(turned, distribution.flip(1))


def test_draws_invert_the_distribution_function_exactly():
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0])
    uniform = torch.tensor([0.0, 0.25, 0.4999, 0.5, 0.74, 0.75, 0.999999], dtype=torch.float64)
    drawn = draw(weights.expand(7, 6), uniform)
    assert drawn.tolist() == [1, 1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_a_token_of_weight_0_is_never_drawn(uniform):
    distribution = torch.tensor([[0.0, 0.4, 0.6, 0.0]])
    for function in (draw_with_replacement, draw_without_replacement):
        assert set(function(distribution, torch.full((1, 2), uniform, dtype=torch.float64))[0].tolist()) <= {1, 2}


# --- random numbers ---

CPU = torch.device("cpu")


def test_numbers_are_uniform_and_uncorrelated_over_positions_requests_and_roles():
    rng = CounterRNG(0, range(200), CPU)
    positions = torch.arange(200).expand(200, 200)
    numbers = {role: rng.uniform(role, positions, positions[:, :1]) for role in Role}
    for values in numbers.values():
        assert_uniform_and_uncorrelated(values)
    table = torch.stack([values.flatten() for values in numbers.values()])
    assert (torch.corrcoef(table) - torch.eye(4)).abs().max() < 0.02


def assert_uniform_and_uncorrelated(values):
    assert values.min() >= 0
    assert values.max() < 1
    counts = torch.histc(values.float(), 20, 0, 1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 19 + 4 * (2 * 19) ** 0.5
    for one, other in ((values[:, 1:], values[:, :-1]), (values[1:], values[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < 0.02


@pytest.mark.parametrize("role", [Role.DRAFT, Role.ACCEPT])
def test_a_position_gets_other_numbers_for_drafting_and_accepting_in_another_round(role):
    rng, positions = CounterRNG(0, range(500), CPU), torch.full((500, 1), 9)
    one, other = (rng.uniform(role, positions, torch.full((500, 1), first)) for first in (7, 8))
    assert abs(float(torch.corrcoef(torch.cat([one, other], 1).T)[0, 1])) < 0.15
    with pytest.raises(ValueError, match="belong to a round"):
        rng.uniform(role, positions)


# --- trees -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings_", "reason"),
    [
        ({"kind": "static"}, "exactly one of paths and branching"),
        ({"kind": "static", "paths": []}, "at least one token"),
        ({"kind": "static", "paths": [[0], [0]]}, "each token once"),
        ({"kind": "static", "paths": [[0], [1, 0]]}, r"\[1, 0\] is there, its parent \[1\] is not"),
        ({"kind": "static", "paths": [[0], [0, 1]]}, r"\[0, 1\] is there, \[0, 0\] is not"),
        ({"kind": "static", "branching": []}, "at least one depth"),
    ],
)
def test_settings_that_are_no_tree_are_refused_with_the_reason(settings_, reason):
    with pytest.raises(ValidationError, match=reason):
        TypeAdapter(TreeConfig).validate_python(settings_)


def test_paths_and_branching_say_the_same_tree():
    by_paths = StaticTree(kind="static", paths=[[1], [0, 0], [0], [1, 0], [1, 1], [0, 1]])
    by_branching = StaticTree(kind="static", branching=[2, 2])
    assert tree_from(by_paths, 2) == tree_from(by_branching, 2) == Tree((0, 0, 1, 1, 2, 2))
    assert by_paths.depth == by_branching.depth == 2


def test_a_tree_knows_its_measures_and_can_be_cut():
    tree = Tree((0, 0, 0, 1, 1, 3, 4))
    assert (tree.num_nodes, tree.depth, tree.width, tree.depths) == (7, 3, 3, (0, 1, 1, 1, 2, 2, 2, 3))
    assert tree.cut(2) == Tree((0, 0, 0, 1, 1, 3))
    assert tree.cut(0) == Tree(())
    assert (Tree(()).depth, Tree(()).width) == (0, 0)
    grown = DynamicTreeSpec(num_nodes=6, width=4, depth=5)
    assert (grown.cut(2).depth, grown.num_slots, grown.cut(2).num_slots) == (2, 16, 6)
    assert DynamicTreeSpec(num_nodes=2, width=1, depth=5).num_slots == 5  # a chain in its place may be as long as it is deep

"""Counter-based random numbers: uniform, uncorrelated, and functions of their coordinates alone."""

import pytest
import torch

from heads.sampling.counter_rng import CounterRNG, Role
from heads.sampling.token_tree import distinct_positions

CPU = torch.device("cpu")


def test_numbers_are_uniform_and_uncorrelated_over_positions_requests_and_roles():
    rng = CounterRNG(0, range(200), CPU)
    positions = torch.arange(200).expand(200, 200)
    numbers = {role: rng.uniform(role, positions, positions[:, :1]) for role in Role}
    for values in numbers.values():
        assert_uniform_and_uncorrelated(values)
    table = torch.stack([values.flatten() for values in numbers.values()])
    assert (torch.corrcoef(table) - torch.eye(4)).abs().max() < 0.02


@pytest.mark.parametrize("role", [Role.DRAFT, Role.ACCEPT])
def test_tokens_of_a_tree_at_one_position_have_numbers_that_are_uniform_and_uncorrelated(role):
    positions = torch.full((200, 200), 9)
    assert_uniform_and_uncorrelated(
        CounterRNG(0, range(200), CPU).uniform(role, distinct_positions(positions), positions[:, :1])
    )


def assert_uniform_and_uncorrelated(values):
    assert values.min() >= 0
    assert values.max() < 1
    counts = torch.histc(values.float(), 20, 0, 1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 19 + 4 * (2 * 19) ** 0.5
    for one, other in ((values[:, 1:], values[:, :-1]), (values[1:], values[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < 0.02


def test_a_request_gets_the_same_numbers_wherever_it_stands_and_others_by_another_seed():
    positions = torch.arange(5).expand(3, 5)
    one = CounterRNG(3, [10, 20, 30], CPU)
    other = CounterRNG(3, [30, 10], CPU)
    rounds = torch.tensor([[5], [7], [5]])
    assert torch.equal(
        one.uniform(Role.DRAFT, positions, rounds)[0], other.uniform(Role.DRAFT, positions[:2], rounds[:2].flip(0))[1]
    )
    assert one.uniform(Role.TARGET, positions)[0, 0] != CounterRNG(4, [10], CPU).uniform(Role.TARGET, positions[:1])[0, 0]
    one.keep_rows([2])
    assert torch.equal(one.uniform(Role.TARGET, positions[:1])[0], other.uniform(Role.TARGET, positions[:2])[0])


@pytest.mark.parametrize("role", [Role.DRAFT, Role.ACCEPT])
def test_a_position_gets_other_numbers_for_drafting_and_accepting_in_another_round(role):
    rng, positions = CounterRNG(0, range(500), CPU), torch.full((500, 1), 9)
    one, other = (rng.uniform(role, positions, torch.full((500, 1), first)) for first in (7, 8))
    assert abs(float(torch.corrcoef(torch.cat([one, other], 1).T)[0, 1])) < 0.15
    with pytest.raises(ValueError, match="belong to a round"):
        rng.uniform(role, positions)

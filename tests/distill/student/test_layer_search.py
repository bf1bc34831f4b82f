"""Layers are chosen as asked; the search finds the blocks that do something."""

import pytest
import torch

from configs.runtime.errors import ConfigError
from configs.schema.learning import StudentConfig
from distill.dataset.batches import Example, collate
from distill.loss.draft_objective import target_hidden
from distill.student.layer_search import choose_layers, mean_acceptance, search_layers, spread_layers


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    """A target whose blocks 2 and 4 of 0 to 4 pass on what they get."""
    model = tiny_llama(seed=1, layers=5, dtype=torch.float32)
    with torch.no_grad():
        for idle in (2, 4):
            model.model.layers[idle].self_attn.o_proj.weight.zero_()
            model.model.layers[idle].mlp.down_proj.weight.zero_()
    return as_target(model)


@pytest.fixture(scope="module")
def calibration():
    ids = torch.randint(5, 64, (10, 12), generator=torch.Generator().manual_seed(0))
    return [Example(tuple(row), 4) for row in ids.tolist()]


@pytest.mark.parametrize(
    ("choice", "layers"), [("first", [0, 1, 2]), ("last", [2, 3, 4]), ("spread", [0, 2, 4]), ("searched", [0, 1, 3])]
)
def test_layers_are_chosen_as_asked(target, calibration, choice, layers):
    student = StudentConfig(layer_choice=choice, num_layers=3)
    assert choose_layers(student, target, calibration) == layers


def test_spread_layers_reach_from_the_first_block_to_the_last_and_never_name_one_twice():
    assert [spread_layers(count, 30) for count in (1, 2, 4)] == [[0], [0, 29], [0, 9, 19, 29]]
    assert spread_layers(30, 30) == list(range(30))
    assert all(len(set(spread_layers(count, total))) == count for total in range(1, 13) for count in range(1, total + 1))


def test_leaving_out_idle_blocks_costs_nothing_and_others_do(target, calibration):
    batch = collate(calibration)
    seen = [(batch, target_hidden(target, batch))]
    assert mean_acceptance([0, 1, 3], target, seen) == pytest.approx(1.0, abs=1e-5)
    assert mean_acceptance([0, 2, 4], target, seen) < 0.9


def test_the_search_keeps_to_its_budget_and_finds_the_same_each_time(target, calibration, monkeypatch):
    tried = []

    def count(layers, *_):
        tried.append(tuple(layers))
        return float(sum(layers))

    monkeypatch.setattr("distill.student.layer_search.mean_acceptance", count)
    first = search_layers(2, target, calibration, 4)
    assert len(tried) == len(set(tried)) == 5
    assert search_layers(2, target, calibration, 4) == first
    assert search_layers(2, target, calibration, 100) == [3, 4]


def test_more_layers_than_there_are_is_refused(target, calibration):
    with pytest.raises(ConfigError, match=r"student\.num_layers: expected at most the target's 5 blocks, got 6"):
        choose_layers(StudentConfig(layer_choice="first", num_layers=6), target, calibration)


def test_searching_by_nothing_is_a_mistake_of_the_caller(target):
    with pytest.raises(ValueError, match="there are none"):
        choose_layers(StudentConfig(layer_choice="searched", num_layers=2), target, [])

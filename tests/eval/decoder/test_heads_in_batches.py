"""At a temperature a request gets the same tokens and rounds from a head alone and beside others that end sooner or later."""

import copy
import itertools

import pytest

from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import DynamicTree
from tests.support import family_checks as checks
from tests.support.decoding import HEADS, assert_same_alone, head_proposer

# In a context of 24 tokens the rows have room for 6, 15, 22 and 1 more.
PROMPTS = [
    [(7 * n + 3) % 64 for n in range(18)],
    [20, 9, 9, 31, 5, 6, 2, 50, 17],
    [40, 11],
    [(5 * n + 1) % 64 for n in range(23)],
]
SAMPLED = DecodeConfig(num_speculative_tokens=4, max_new_tokens=30, temperature=1.0)


@pytest.fixture(scope="module")
def short_target(as_target):
    model = copy.deepcopy(checks.tiny_target("llama"))
    model.config.max_position_embeddings = 24
    return as_target(model)


@pytest.mark.parametrize(("name", "rule"), list(zip(HEADS, itertools.cycle(["token", "block", "match"]))))
def test_a_chain_of_a_head_owes_nothing_to_the_batch(short_target, name, rule):
    """Every head with one of the rules, which know nothing of heads."""
    config = SAMPLED.model_copy(update={"verification": rule})
    assert_same_alone(short_target, config, head_proposer(name, short_target.model), PROMPTS)


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle3", "mtp"])
def test_a_grown_tree_owes_nothing_to_the_batch(short_target, name):
    tree = DynamicTree(kind="dynamic", num_nodes=6, width=4)
    config = SAMPLED.model_copy(update={"tree": tree, "verification": "match"})
    assert_same_alone(short_target, config, head_proposer(name, short_target.model), PROMPTS)

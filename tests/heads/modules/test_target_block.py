"""A block run apart from the target: which keys it sees, and which targets' blocks cannot be run so."""

from copy import deepcopy

import pytest
import torch

from configs.runtime.errors import InputError
from heads.modules.target_block import BlockContext, unrolled_mask
from tests.support import family_checks as checks


def sees(documents, origin, depth, key_origin, key_depth, window):
    """Whether the chain of an origin sees a key at a depth."""
    past = key_depth == 0 and key_origin <= origin and documents[key_origin] == documents[origin]
    own_chain = key_depth > 0 and key_origin == origin
    return (past or own_chain) and (window is None or origin + depth - key_origin - key_depth < window)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 9])
def test_each_chain_sees_its_past_and_itself_within_the_window(window):
    documents = [0, 0, 0, 0, 1, 1, 1]
    places = range(len(documents))
    causal_TT = torch.tensor([[sees(documents, origin, 0, key, 0, None) for key in places] for origin in places])
    for depth in range(4):
        keys = [(key, key_depth) for key_depth in range(depth + 1) for key in places]
        expected = [[sees(documents, origin, depth, *key, window) for key in keys] for origin in places]
        assert unrolled_mask(causal_TT[None, None], depth, window)[0, 0].tolist() == expected


@pytest.mark.parametrize("name", checks.CONFIGS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_block_of_the_four_families_runs_apart(name, attention):
    model = deepcopy(checks.tiny_target(name))
    model.set_attn_implementation(attention)
    for number in range(4):
        BlockContext(model, number)


def test_a_block_that_gets_something_else_in_the_target_is_refused():
    model = deepcopy(checks.tiny_target("llama"))
    model.config.sliding_window = 3  # which Llama does not heed
    with pytest.raises(InputError, match="block 1 of LlamaForCausalLM needs more around it"):
        BlockContext(model, 1)

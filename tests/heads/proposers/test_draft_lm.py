"""A draft LM catches up on each row's own text, whatever its neighbours have to catch up on."""

import pytest
import torch

from heads.proposers.draft_lm import DraftLM
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.token_tree import DynamicTreeSpec, Tree

SHAPES = {"chain": Tree((0, 1, 2, 3, 4)), "grown": DynamicTreeSpec(num_nodes=5, width=1, depth=5)}


def likeliest(model, row, num_tokens):
    """Return what the model itself writes after a text, with no cache."""
    for _ in range(num_tokens):
        row = [*row, int(model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1].argmax())]
    return row[-num_tokens:]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("paths", [([11, 12, 13, 14, 15], []), ([], [11, 12, 13, 14, 15]), ([11], [12, 13, 14])])
@torch.no_grad()
def test_a_row_may_have_fewer_tokens_than_its_neighbour_has_to_catch_up_on(tiny_llama, shape, paths):
    model = tiny_llama(seed=2)
    draft, rng = DraftLM(model, 64), CounterRNG(0, [1, 2], torch.device("cpu"))
    rows = [[5, 9], [7, 3]]  # a prompt of one token each, and the first token of the answer
    draft.start(rows, 24)
    draft.propose_tree(rows, SHAPES[shape], None, rng)
    draft.commit([len(path) for path in paths])
    rows = [[*row, *path, 40] for row, path in zip(rows, paths, strict=True)]
    proposal = draft.propose_tree(rows, SHAPES[shape], None, rng)
    assert proposal.tokens_BG.tolist() == [likeliest(model, row, 5) for row in rows]

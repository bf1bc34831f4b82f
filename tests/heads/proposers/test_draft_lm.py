"""A draft LM catches up on each row's own text, whatever its neighbours have to catch up on, and may be on another device."""

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, StaticTree
from configs.schema.target import TargetConfig
from eval.decoder.decode import decode
from heads.artifact import load_draft
from heads.frozen.loading import load_target
from heads.proposers.draft_lm import DraftLM
from heads.proposers.protocol import RoundInputs
from heads.sampling.draws import CounterRNG
from heads.sampling.token_tree import DynamicTreeSpec, Tree
from tests.support.decoding import PROMPTS, requests_for

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
    draft.propose_tree(RoundInputs.of(rows, rng), SHAPES[shape], None)
    draft.commit([len(path) for path in paths])
    rows = [[*row, *path, 40] for row, path in zip(rows, paths, strict=True)]
    proposal = draft.propose_tree(RoundInputs.of(rows, rng), SHAPES[shape], None)
    assert proposal.tokens_BG.tolist() == [likeliest(model, row, 5) for row in rows]


@pytest.mark.parametrize("tree", [None, StaticTree(kind="static", branching=[2, 1, 1])])
def test_answers_are_those_of_the_draft_on_the_targets_device(tiny_llama, as_target, tree):
    target, model = as_target(tiny_llama(seed=1)), tiny_llama(seed=2)
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12, temperature=1.0, tree=tree, verification="token")
    away, home = (
        decode(target, requests_for(PROMPTS), config, DraftLM(model, 64, home=device), measure_overlap=True)[0]
        for device in (torch.device("cpu"), None)
    )
    assert away == home


def test_an_artifact_is_loaded_where_it_is_asked_for(tiny_run):
    target = load_target(TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"))
    away = load_draft(tiny_run / "artifact", target.identity, target.model, device="cpu")
    assert away.proposer.home == torch.device("cpu")
    for device in ("cuda:7", "gpu", "cpu:x"):
        with pytest.raises(InputError, match=f"draft_device: '{device}' cannot be used"):
            load_draft(tiny_run / "artifact", target.identity, target.model, device=device)

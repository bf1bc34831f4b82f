"""Layers of a head's own sizes are refused where they cannot be, and read no more keys than their window has."""

import pytest
import torch
from torch.nn import functional

from configs.runtime.errors import InputError
from configs.schema.decoding import SamplingConfig
from configs.schema.heads import LayerSettings
from heads.families.registry import FAMILIES
from heads.modules.layers import layer_shape
from heads.proposers.protocol import RoundInputs
from heads.sampling.draws import CounterRNG
from heads.sampling.token_tree import Tree
from tests.support import family_checks as checks


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (LayerSettings(num_heads=3, num_key_value_heads=3), "3 heads and 3 key-value heads at width 32"),
        (LayerSettings(num_key_value_heads=3), "4 heads and 3 key-value heads"),
        (LayerSettings(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rotary embeddings of type dynamic"),
    ],
)
def test_layers_that_cannot_be_are_refused(settings, words):
    with pytest.raises(InputError, match=words):
        layer_shape(checks.tiny_target("llama"), settings)


@torch.no_grad()
def test_tokens_read_as_many_keys_as_their_window_has_however_long_the_text_is(monkeypatch):
    model = checks.tiny_target("llama")
    head = checks.build(checks.SETTINGS["eagle3, window"], model)  # of 4
    proposer = FAMILIES["eagle3"].propose(head, model.device)
    tokens = [list(range(30)), list(range(28))]
    checks.Rounds(proposer, model).start(tokens)
    read, attend = [], functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda q, k, *rest, **how: read.append(k.shape[2]) or attend(q, k, *rest, **how),
    )
    inputs = RoundInputs.of(tokens, CounterRNG(0, [0, 0], model.device))
    proposer.propose(inputs, 4, SamplingConfig(), keep_logits=False)
    assert max(read[-2 * 3 :]) <= 6  # of rows that are two positions apart
    read.clear()
    proposer.propose_tree(inputs, Tree((0, 0, 1, 2)), None)
    assert max(read[-2:]) <= 8  # those of a tree read all of it

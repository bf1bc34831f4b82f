"""Layers of a head's own sizes: what is left open is the target's, and scaled rotary embeddings are transformers'."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from configs.runtime.errors import InputError
from configs.schema.heads import LayerSettings
from heads.modules.layers import Rotary, layer_shape
from tests.support import family_checks as checks
from tests.support.family_checks import LLAMA3, YARN


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3, YARN])
def test_rotations_are_those_of_a_llama_with_these_parameters(scaling):
    settings = LayerSettings(head_width=8, rope_theta=100.0, rope_scaling=scaling)
    rotary = Rotary(layer_shape(checks.tiny_target("llama"), settings))
    rope = {"rope_type": "default", "rope_theta": 100.0} | (scaling or {})
    config = LlamaConfig(hidden_size=32, head_dim=8, max_position_embeddings=128, rope_parameters=rope)
    positions_BT = torch.tensor([[0, 1, 7, 40, 100]])
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions_BT)
    torch.testing.assert_close(rotary(torch.zeros(1), positions_BT), expected, rtol=0, atol=0)


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

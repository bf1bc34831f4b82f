"""Layers of a head's own sizes: what is left open is the target's, and scaled rotary embeddings are transformers'."""

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.heads import LayerSettings
from heads.inference.kv_cache import RowCache
from heads.modules.layer_keys import visible_slots
from heads.modules.layers import layer_shape
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


def test_a_token_sees_the_last_positions_of_a_window():
    cache = RowCache(1, 12)
    for place in range(8):
        cache.place([place], 1, torch.device("cpu"))
        visible = visible_slots(cache, torch.tensor([[place]]), window=4)
        seen = list(range(place + 1)) if visible is None else visible[0, 0, 0].nonzero().flatten().tolist()
        assert seen == list(range(max(0, place - 3), place + 1))
        assert visible_slots(cache, torch.tensor([[place]])) is None

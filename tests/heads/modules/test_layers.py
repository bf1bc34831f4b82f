"""Layers of a head's own sizes: what is left open is the target's, and scaled rotary embeddings are transformers'."""

import pytest

from configs.runtime.errors import InputError
from configs.schema.heads import LayerSettings
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

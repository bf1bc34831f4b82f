"""Layers of a head's own sizes: what is left open is the target's, and scaled rotary frequencies are the written-out ones."""

import math

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.heads import LayerSettings
from heads.modules.layers import Rotary, layer_shape, shape_like
from tests.support import family_checks as checks
from tests.support.family_checks import LLAMA3, YARN

OLD, FACTOR, THETA, WIDTH = 32, 4.0, 100.0, 8  # those of LLAMA3 and YARN


def llama3(frequency, index):
    """Divide slow rotations by the factor, leave fast ones, and go over from one to the other between."""
    turns = OLD * frequency / (2 * math.pi)  # within the length trained on
    if turns < 1.0:
        return frequency / FACTOR
    if turns > 4.0:
        return frequency
    fast = (turns - 1.0) / (4.0 - 1.0)
    return (1 - fast) * frequency / FACTOR + fast * frequency


def yarn(frequency, index):
    """The same between the places of 32 turns and of one turn, by the place of the frequency."""

    def place(turns):
        return WIDTH * math.log(OLD / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    first, last = max(math.floor(place(32)), 0), min(math.ceil(place(1)), WIDTH - 1)
    slow = min(max((index - first) / (last - first), 0.0), 1.0)
    return slow * frequency / FACTOR + (1 - slow) * frequency


@pytest.mark.parametrize(
    ("scaling", "changed", "length"),
    [
        (None, lambda frequency, _: frequency, 1.0),
        ({"rope_type": "linear", "factor": FACTOR}, lambda frequency, _: frequency / FACTOR, 1.0),
        (LLAMA3, llama3, 1.0),
        (YARN, yarn, 0.1 * math.log(FACTOR) + 1.0),
    ],
    ids=["plain", "linear", "llama3", "yarn"],
)
def test_rotations_are_those_written_out(scaling, changed, length):
    settings = LayerSettings(head_width=WIDTH, rope_theta=THETA, rope_scaling=scaling)
    rotary = Rotary(layer_shape(checks.tiny_target("llama"), settings))
    positions = [0, 1, 7, 40, 100]
    cos_1TH, sin_1TH = rotary(torch.zeros(1), torch.tensor([positions]))
    frequencies = [THETA ** (-2 * index / WIDTH) for index in range(WIDTH // 2)]
    scaled = [changed(frequency, index) for index, frequency in enumerate(frequencies)]
    angles_TH = torch.tensor([[position * frequency for frequency in scaled * 2] for position in positions])
    torch.testing.assert_close(cos_1TH[0], angles_TH.cos() * length, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sin_1TH[0], angles_TH.sin() * length, atol=1e-5, rtol=1e-5)


def test_what_is_left_open_is_the_targets():
    target = checks.tiny_target("llama")
    assert layer_shape(target, None) == layer_shape(target, LayerSettings()) == shape_like(target)
    shape = layer_shape(target, LayerSettings(mlp_width=20, norm_epsilon=1e-3, rope_scaling=LLAMA3))
    assert (shape.mlp_width, shape.norm_epsilon, shape.width) == (20, 1e-3, 32)
    assert shape.rope_parameters == LLAMA3 | {"rope_theta": shape.rope_theta}


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

"""Unrolled attention is one softmax over the causal block and the own chain: what a dense mask over all keys gives."""

import pytest
import torch

from heads.families.eagle3 import UnrolledKeys
from heads.modules.layers import DraftAttention, LayerShape, Rotary, causal_mask

DEPTHS = 4
DOCUMENTS_BT = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, -1, -1]])


def made(num_key_value_heads):
    """Return an attention layer, its rotary embedding, and random states `[K, B, T, D]` to read at each depth."""
    shape = LayerShape(
        width=24,
        mlp_width=8,
        num_heads=4,
        num_key_value_heads=num_key_value_heads,
        head_width=6,
        norm_epsilon=1e-6,
        rope_theta=100.0,
        max_positions=64,
    )
    torch.manual_seed(0)
    attention = DraftAttention(shape, 24).double()
    return attention, Rotary(shape), torch.randn(DEPTHS, *DOCUMENTS_BT.shape, 24, dtype=torch.float64) * 3


def dense(attention, states, rotations, depth):
    """Return the attention output of one depth, over the keys of all depths up to it side by side, by a mask of them all."""
    T = DOCUMENTS_BT.shape[1]
    pairs = [attention.keys_values(*each) for each in zip(states[: depth + 1], rotations, strict=False)]
    keys, values = (torch.cat(each, 2) for each in zip(*pairs, strict=True))
    own_TT = torch.eye(T, dtype=torch.bool).expand(len(DOCUMENTS_BT), 1, T, T)
    visible_B1TS = torch.cat([causal_mask(DOCUMENTS_BT), *[own_TT] * depth], -1)
    return attention.attend(attention.queries(states[depth], rotations[depth]), keys, values, visible_B1TS)


@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4], ids=["one key head", "grouped", "a key head each"])
def test_every_depth_is_attention_under_a_dense_mask(num_key_value_heads):
    attention, rotary, states = made(num_key_value_heads)
    positions_BT = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
    rotations = [rotary(states, positions_BT + depth) for depth in range(DEPTHS)]
    unrolled = UnrolledKeys(causal_mask(DOCUMENTS_BT))
    for depth in range(DEPTHS):
        found_BTD = unrolled.attend(attention, states[depth], rotations[depth])
        expected_BTD = dense(attention, states, rotations, depth)
        torch.testing.assert_close(found_BTD, expected_BTD, atol=1e-5, rtol=1e-5)  # weights are computed in float32


def test_gradients_flow_through_all_depths_as_under_a_dense_mask():
    attention, rotary, states = made(2)
    rotations = [rotary(states, torch.arange(7).expand(2, -1) + depth) for depth in range(DEPTHS)]
    gradients = []
    for way in ("unrolled", "dense"):
        leaf = states.clone().requires_grad_()
        unrolled = UnrolledKeys(causal_mask(DOCUMENTS_BT))
        outputs = [
            unrolled.attend(attention, leaf[depth], rotations[depth])
            if way == "unrolled"
            else dense(attention, list(leaf), rotations, depth)
            for depth in range(DEPTHS)
        ]
        gradients.append(torch.autograd.grad(torch.stack(outputs).square().sum(), leaf)[0])
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)
    assert bool(gradients[0].abs().amax(-1).gt(0).all())


def test_a_chain_sees_nothing_of_other_chains_nor_of_later_origins():
    attention, rotary, states = made(2)
    rotations = [rotary(states, torch.arange(7).expand(2, -1) + depth) for depth in range(DEPTHS)]

    def last_depth(states):
        unrolled = UnrolledKeys(causal_mask(DOCUMENTS_BT))
        return [unrolled.attend(attention, states[depth], rotations[depth]) for depth in range(DEPTHS)][-1]

    plain_BTD, changed = last_depth(states), states.clone()
    changed[1:, 0, 4] += 1  # the deeper states of one origin
    changed[0, 0, 5] += 1  # and a depth-0 state after it, in the same document
    differs_BT = (last_depth(changed) - plain_BTD).abs().amax(-1) > 1e-9
    assert differs_BT.tolist() == [[False, False, False, False, True, True, True], [False] * 7]

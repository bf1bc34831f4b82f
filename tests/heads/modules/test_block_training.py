"""Attention of many blocks at once is attention under a dense mask over the row and all blocks."""

import pytest
import torch
from torch.nn import functional

from heads.modules.block_training import BlockKeys, mix_blocks
from heads.modules.layers import DraftAttention, LayerShape, Rotary

B, T, A, S, H = 2, 7, 3, 4, 8


@pytest.fixture
def visible_BAT():
    """Blocks at three places a row; the last block of the second row is padding and sees nothing."""
    places_BA = torch.tensor([[2, 3, 6], [1, 5, 0]])
    return torch.arange(T) < places_BA.unsqueeze(-1)


def dense_mask(visible_BAT):
    """Return which of the row's T and the blocks' A * S keys each slot sees, bool `[B, 1, X, T + X]`."""
    own_XX = torch.block_diag(*[torch.ones(S, S)] * A).bool()
    to_context_BXT = visible_BAT.repeat_interleave(S, 1)
    return torch.cat([to_context_BXT, own_XX.expand(B, -1, -1)], -1).unsqueeze(1)


@pytest.mark.parametrize(("num_kv_heads", "at_once"), [(1, 2**26), (2, 2**26), (2, 800), (4, 1)])
def test_values_and_gradients_are_those_of_a_dense_mask(visible_BAT, num_kv_heads, at_once):
    torch.manual_seed(0)
    q_BNXH = torch.randn(B, 4, A * S, H, dtype=torch.float64, requires_grad=True)
    parts = [
        torch.randn(B, num_kv_heads, length, H, dtype=torch.float64, requires_grad=True) for length in (T, T, A * S, A * S)
    ]
    k_context, v_context, k_own, v_own = parts
    mixed = mix_blocks(q_BNXH, (k_context, v_context), (k_own, v_own), visible_BAT, at_once=at_once)
    keys, values = torch.cat([k_context, k_own], 2), torch.cat([v_context, v_own], 2)
    expected = functional.scaled_dot_product_attention(q_BNXH, keys, values, attn_mask=dense_mask(visible_BAT), enable_gqa=True)
    torch.testing.assert_close(mixed, expected)
    ahead = torch.randn_like(mixed)
    gradients = torch.autograd.grad(mixed, [q_BNXH, *parts], ahead)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, [q_BNXH, *parts], ahead), strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_a_layer_projects_turns_and_mixes_the_row_and_the_blocks_alike(visible_BAT):
    shape = LayerShape(
        width=16,
        mlp_width=8,
        num_heads=4,
        num_key_value_heads=2,
        head_width=H,
        norm_epsilon=1e-6,
        rope_theta=1e4,
        max_positions=64,
    )
    torch.manual_seed(0)
    attention, rotary = DraftAttention(shape, 16, norm_heads=True).double(), Rotary(shape)
    context_BTD, states_BXD = torch.randn(B, T, 16).double(), torch.randn(B, A * S, 16).double()
    places_BT, places_BX = torch.arange(T).expand(B, T), torch.randint(20, (B, A * S))
    keys = BlockKeys(context_BTD, rotary(context_BTD, places_BT), visible_BAT)
    out_BXD = keys.attend(attention, states_BXD, rotary(states_BXD, places_BX))
    both_BSD, both_BS = torch.cat([context_BTD, states_BXD], 1), torch.cat([places_BT, places_BX], 1)
    k_BMSH, v_BMSH = attention.keys_values(both_BSD, rotary(both_BSD, both_BS))
    q_BNXH = attention.queries(states_BXD, rotary(states_BXD, places_BX))
    torch.testing.assert_close(out_BXD, attention.attend(q_BNXH, k_BMSH, v_BMSH, dense_mask(visible_BAT)))

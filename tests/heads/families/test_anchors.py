"""Attention of many blocks is that under a dense mask over the row and all blocks; anchors are where blocks are drafted."""

import pytest
import torch
from torch.nn import functional

from heads.families.dflash import choose_anchors, mix_blocks
from heads.modules.attention import Ranges
from heads.modules.interface import NO_DOCUMENT, Batch

B, T, A, S, H = 2, 7, 3, 4, 8


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_values_and_gradients_are_those_of_a_dense_mask_over_the_row_and_all_blocks(num_kv_heads):
    torch.manual_seed(0)
    sizes = [(4, A * S), *((num_kv_heads, length) for length in (T, T, A * S, A * S))]
    parts = [torch.randn(B, heads, length, H, dtype=torch.float64, requires_grad=True) for heads, length in sizes]
    q_BNXH, k_context, v_context, k_own, v_own = parts
    # Blocks at three places a row; the last block of the second row is padding and sees nothing.
    first_BA, end_BA = torch.tensor([[0, 0, 4], [0, 2, 0]]), torch.tensor([[2, 3, 6], [1, 5, 0]])
    ranges = Ranges(first_BX=first_BA.repeat_interleave(S, 1), end_BX=end_BA.repeat_interleave(S, 1))
    mixed = mix_blocks(q_BNXH, (k_context, v_context), (k_own, v_own), ranges, S)
    visible_BAT = (torch.arange(T) >= first_BA.unsqueeze(-1)) & (torch.arange(T) < end_BA.unsqueeze(-1))
    own_BXX = torch.block_diag(*[torch.ones(S, S)] * A).bool().expand(B, -1, -1)
    mask_B1XS = torch.cat([visible_BAT.repeat_interleave(S, 1), own_BXX], -1).unsqueeze(1)
    keys, values = torch.cat([k_context, k_own], 2), torch.cat([v_context, v_own], 2)
    expected = functional.scaled_dot_product_attention(q_BNXH, keys, values, attn_mask=mask_B1XS, enable_gqa=True)
    torch.testing.assert_close(mixed, expected)
    ahead = torch.randn_like(mixed)
    torch.testing.assert_close(torch.autograd.grad(mixed, parts, ahead), torch.autograd.grad(expected, parts, ahead))


# Two documents and padding; a prompt, an answer; a prompt, an answer that is broken off by another turn's prompt.
DOCUMENTS = [0] * 7 + [1] * 9 + [NO_DOCUMENT] * 2
LABELS = [0, 0, 0, 1, 1, 1, 1] + [0, 1, 1, 0, 0, 1, 1, 1, 1] + [0] * 2
ANCHORS = [3, 4, 5, 8, 12, 13, 14]  # an answer's token with another one of the same document after it


def batch_of(documents, labels):
    documents_BT, labels_BT = torch.tensor(documents), torch.tensor(labels).bool()
    B, T = documents_BT.shape
    return Batch(
        input_ids_BT=torch.arange(B * T).reshape(B, T),
        loss_mask_BT=labels_BT,
        position_ids_BT=torch.zeros_like(documents_BT),
        document_ids_BT=documents_BT,
        conversations_BC=torch.zeros(B, 1, dtype=torch.long),
    )


@pytest.fixture
def batch():
    """The row above, a row with no anchor, and a row that is one answer but for its first token."""
    nothing = [0] * 17 + [1]
    whole = [0] + [1] * 17
    return batch_of([DOCUMENTS, [0] * 18, [0] * 18], [LABELS, nothing, whole])


def test_all_anchors_are_the_places_that_a_block_would_be_drafted_from(batch):
    anchors = choose_anchors(batch, None)
    places = [row[valid].tolist() for row, valid in zip(anchors.places_BA, anchors.valid_BA, strict=True)]
    assert places == [ANCHORS, [], list(range(1, 17))]
    assert anchors.weights_BA.tolist() == anchors.valid_BA.float().tolist()


def test_every_anchor_is_drawn_as_often_as_every_other():
    row = batch_of([DOCUMENTS] * 1000, [LABELS] * 1000)
    torch.manual_seed(1)
    anchors = choose_anchors(row, 2)
    drawn_T = torch.bincount(anchors.places_BA[anchors.valid_BA], minlength=18) / 1000
    # 2 of 3, and 2 of 4; the standard error is below 0.016
    assert drawn_T[[3, 4, 5]].tolist() == pytest.approx([2 / 3] * 3, abs=0.06)
    assert drawn_T[[8, 12, 13, 14]].tolist() == pytest.approx([1 / 2] * 4, abs=0.06)
    assert drawn_T.sum() == pytest.approx(4)

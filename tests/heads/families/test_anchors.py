"""Anchors are where blocks are drafted, each as often as every other."""

import pytest
import torch

from heads.families.dflash import choose_anchors
from heads.modules.interface import NO_DOCUMENT, Batch

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

"""Features wait for the tokens after them, row by row, whatever each row kept of the last round."""

import torch

from heads.modules.autoregressive import PendingFeatures

FEATURES_BTF = torch.arange(2 * 5 * 1.0).view(2, 5, 1)


def test_the_prompts_features_wait_for_the_tokens_after_them():
    pending = PendingFeatures(FEATURES_BTF, [3, 4])
    assert (pending.first, pending.counts, pending.ends) == ([0, 0], [3, 4], [3, 4])
    assert torch.equal(pending.features_BTF, FEATURES_BTF[:, :4])  # no row has more
    assert pending.last_B.tolist() == [2, 3]
    tokens = [[10, 11, 12, 13], [20, 21, 22, 23, 24]]
    assert pending.next_tokens(tokens).tolist() == [[11, 12, 13, 0], [21, 22, 23, 24]]


def test_what_follows_begins_where_each_row_ended():
    pending = PendingFeatures(FEATURES_BTF, [3, 4])
    pending.replace(FEATURES_BTF, [1, 2])
    assert (pending.first, pending.ends) == ([3, 4], [4, 6])
    assert pending.features_BTF.shape == (2, 2, 1)
    assert pending.next_tokens([list(range(10, 15)), list(range(20, 27))]).tolist() == [[14, 0], [25, 26]]
    pending.replace(FEATURES_BTF, [3, 1])
    assert (pending.first, pending.ends, pending.last_B.tolist()) == ([4, 6], [7, 7], [2, 0])


def test_rows_leave_and_change_places():
    pending = PendingFeatures(FEATURES_BTF, [3, 4])
    pending.replace(FEATURES_BTF, [1, 2])
    pending.keep_rows([1, 0])
    assert (pending.first, pending.counts) == ([4, 3], [2, 1])
    assert torch.equal(pending.features_BTF, FEATURES_BTF[[1, 0], :2])
    pending.keep_rows([1])
    pending.replace(FEATURES_BTF[:1], [2])
    assert (pending.first, pending.ends) == ([4], [6])

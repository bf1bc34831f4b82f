"""Features wait for the tokens after them, row by row, whatever each row kept of the last round."""

import torch

from heads.modules.autoregressive import PendingFeatures

FEATURES_BTF = torch.arange(2 * 5 * 1.0).view(2, 5, 1)


def test_the_prompts_features_wait_for_the_tokens_after_them():
    unread = PendingFeatures(FEATURES_BTF, [3, 4])
    assert (unread.first, unread.counts, unread.ends) == ([0, 0], [3, 4], [3, 4])
    assert torch.equal(unread.features_BTF, FEATURES_BTF[:, :4])  # no row has more
    assert unread.last_B.tolist() == [2, 3]
    tokens = [[10, 11, 12, 13], [20, 21, 22, 23, 24]]
    assert unread.next_tokens(tokens).tolist() == [[11, 12, 13, 0], [21, 22, 23, 24]]


def test_what_follows_begins_where_each_row_ended():
    unread = PendingFeatures(FEATURES_BTF, [3, 4])
    unread.replace(FEATURES_BTF, [1, 2])
    assert (unread.first, unread.ends) == ([3, 4], [4, 6])
    assert unread.features_BTF.shape == (2, 2, 1)
    assert unread.next_tokens([list(range(10, 15)), list(range(20, 27))]).tolist() == [[14, 0], [25, 26]]
    unread.replace(FEATURES_BTF, [3, 1])
    assert (unread.first, unread.ends, unread.last_B.tolist()) == ([4, 6], [7, 7], [2, 0])


def test_rows_leave_and_change_places():
    unread = PendingFeatures(FEATURES_BTF, [3, 4])
    unread.replace(FEATURES_BTF, [1, 2])
    unread.keep_rows([1, 0])
    assert (unread.first, unread.counts) == ([4, 3], [2, 1])
    assert torch.equal(unread.features_BTF, FEATURES_BTF[[1, 0], :2])
    unread.keep_rows([1])
    unread.replace(FEATURES_BTF[:1], [2])
    assert (unread.first, unread.ends) == ([4], [6])

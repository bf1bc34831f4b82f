"""States of recurrent layers follow each row's own text: rows go back, leave and are copied.

Of three kinds: beside attention layers, in one layer with attention, and alone.
"""

import pytest
import torch

from heads.inference.causal_lm import forward_rows, new_cache, read_documents
from tests.support.family_configs import VOCAB_SIZE, tiny_model

FAMILIES = {"beside": "qwen3_5_text", "in_one": "falcon_h1", "alone": "mamba2"}


class Rows:
    """Texts read into a cache, each forward of which is held to one over each text alone."""

    def __init__(self, name, length):
        self.model = tiny_model(FAMILIES[name])
        self.cache = new_cache(self.model, 40)
        self.texts = torch.randint(VOCAB_SIZE, (3, 30), generator=torch.Generator().manual_seed(1)).tolist()
        self.read([0, 0, 0], length)

    def read(self, starts, length):
        ids_BT = torch.tensor([text[start : start + length] for text, start in zip(self.texts, starts, strict=True)])
        hidden_BTD = forward_rows(self.model, self.cache, ids_BT, starts)
        for row_TD, text, start in zip(hidden_BTD, self.texts, starts, strict=True):
            alone_1TD = read_documents(self.model, torch.tensor([text[: start + length]]), None)
            torch.testing.assert_close(row_TD, alone_1TD[0, start:], atol=1e-4, rtol=1e-4)

    def keep(self, rows):
        self.cache.keep_rows(rows)
        self.texts = [list(self.texts[row]) for row in rows]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_go_on_from_their_own_length_leave_and_are_copied(name):
    rows = Rows(name, 9)
    rows.read([9, 4, 1], 4)
    rows.texts[1][6:], rows.texts[2][2:] = [1] * 24, [2] * 28  # two and three of their drafts are rejected
    rows.read([13, 6, 2], 3)
    rows.keep([2, 0, 2])
    rows.texts[0][3:] = [7] * 27
    rows.read([3, 16, 5], 2)
    rows.read([5, 18, 7], 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_goes_back_to_what_is_held_and_no_further(name):
    rows = Rows(name, 5)
    rows.read([5, 5, 3], 1)
    rows.cache.keep_states_from([6, 6, 4])
    for step in range(4):
        rows.read([6 + step, 6 + step, 4 + step], 1)
    rows.read([7, 6, 8], 2)
    with pytest.raises(ValueError, match="row 0 goes on at 6; states are kept for 7 to 9"):
        rows.read([6, 7, 9], 1)

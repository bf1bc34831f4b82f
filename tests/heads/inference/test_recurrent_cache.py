"""States of recurrent layers follow each row's own text: rows go back, leave, are copied and take paths of trees.

Of three kinds: beside attention layers, in one layer with attention, and alone.
"""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconH1Config, Mamba2Config, Qwen3_5TextConfig

from heads.inference.causal_lm import forward_rows, new_cache, read_documents
from heads.sampling.token_tree import tree_attention

SIZE = {"vocab_size": 12, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": None}
BLOCK = SIZE | {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
HEADS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1}
WIDTHS = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
CONFIGS = {
    "beside": Qwen3_5TextConfig(**BLOCK, **WIDTHS, layer_types=["linear_attention", "full_attention"]),
    "in_one": FalconH1Config(**BLOCK, **HEADS, mamba_chunk_size=8),
    "alone": Mamba2Config(**SIZE, pad_token_id=None, num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=8),
}


@cache
def tiny(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(3.0 if parameter.ndim >= 2 else 1.0)
    return model


class Rows:
    """Texts read into a cache, each forward of which is held to one over each text alone."""

    def __init__(self, name, length):
        self.model, self.cache = tiny(name), new_cache(tiny(name), 40)
        self.texts = torch.randint(12, (3, 30), generator=torch.Generator().manual_seed(1)).tolist()
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


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_go_on_from_their_own_length_leave_and_are_copied(name):
    rows = Rows(name, 9)
    rows.read([9, 4, 1], 4)
    rows.texts[1][6:], rows.texts[2][2:] = [1] * 24, [2] * 28  # two and three of their drafts are rejected
    rows.read([13, 6, 2], 3)
    rows.keep([2, 0, 2])
    rows.texts[0][3:] = [7] * 27
    rows.read([3, 16, 5], 2)
    rows.read([5, 18, 7], 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_goes_back_to_what_is_held_and_no_further(name):
    rows = Rows(name, 5)
    rows.read([5, 5, 3], 1)
    rows.cache.keep_states_from([6, 6, 4])
    for step in range(4):
        rows.read([6 + step, 6 + step, 4 + step], 1)
    rows.read([7, 6, 8], 2)
    with pytest.raises(ValueError, match="row 0 goes on at 6; states are kept for 7 to 9"):
        rows.read([6, 7, 9], 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_a_tree_follow_their_parents_and_rows_go_on_from_their_paths(name):
    rows = Rows(name, 8)
    starts, paths = [8, 6, 5], [[0, 2, 4], [0, 1], [0]]
    parents = [0, 0, 1, 2, 2]  # of drafts 1 to 5
    for text, start in zip(rows.texts, starts, strict=True):
        text[start + 1 : start + 3] = [3, 5]
    attention = tree_attention(torch.tensor([parents] * 3), starts)
    tree_BK = torch.tensor([[text[start], 3, 4, 5, 6, 7] for text, start in zip(rows.texts, starts, strict=True)])
    hidden_BKD = forward_rows(rows.model, rows.cache, tree_BK, starts, attention)
    for row, path in enumerate([[0, 1, 3], [0, 2, 4], [0, 2, 5]]):
        text = [*rows.texts[row][: starts[row]], *tree_BK[row, path].tolist()]
        alone_1TD = read_documents(rows.model, torch.tensor([text]), None)
        torch.testing.assert_close(hidden_BKD[row, path], alone_1TD[0, starts[row] :], atol=1e-4, rtol=1e-4)
    rows.cache.keep_path(starts, paths)
    rows.texts[0][9:11] = [4, 6]
    rows.read([11, 8, 6], 3)

"""Layers of a head's own sizes, what they read, and the features that wait for the head: no more in memory than wait."""

import random

import pytest
import torch
from torch.nn import functional

from configs.runtime.errors import InputError
from configs.schema.heads import LayerSettings
from heads.device import row_ints
from heads.inference.kv_cache import RowCache
from heads.modules.attention import CachedKeys, visible_slots
from heads.modules.autoregressive import PendingFeatures
from heads.modules.layers import layer_shape
from heads.proposers.protocol import RoundInputs
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.token_tree import TreeAttention, ancestor_mask
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


def test_a_token_sees_the_last_positions_of_a_window():
    cache = RowCache(1, 12)
    for place in range(8):
        cache.place([place], 1, torch.device("cpu"))
        visible = visible_slots(cache, torch.tensor([[place]]), window=4)
        seen = list(range(place + 1)) if visible is None else visible[0, 0, 0].nonzero().flatten().tolist()
        assert seen == list(range(max(0, place - 3), place + 1))
        assert visible_slots(cache, torch.tensor([[place]])) is None


@torch.no_grad()
def test_tokens_read_as_many_keys_as_their_window_has_however_long_the_text_is(monkeypatch):
    head = checks.build(checks.SETTINGS["eagle3, window"], checks.tiny_target("llama"))
    attention, width = head.layers[0].self_attn, 2 * head.fc.out_features
    twins = ancestor_mask(torch.tensor([[0, 0]] * 2))  # two drafts after the same token, read one at a time
    trees = [
        TreeAttention(
            roots=row_ints([23, 21], torch.device("cpu")),
            depths_BX=twins[:, : n + 1].sum(-1) - 1,
            visible_BTX=twins[:, n : n + 1, : n + 1],
        )
        for n in range(3)
    ]
    steps = [([0, 0], 20, None), ([20, 18], 1, None), ([21, 19], 2, None), *((tree.starts, 1, tree) for tree in trees)]
    states = [torch.randn(2, length, width, dtype=head.dtype) for _, length, _ in steps]

    def outputs():
        cache = RowCache(1, 40)
        for (starts, length, tree), states_BTX in zip(steps, states, strict=True):
            cache.place(starts, length, torch.device("cpu"), tree)
            positions_BT = torch.tensor(starts).unsqueeze(1) + torch.arange(length) if tree is None else tree.positions_BT
            keys = CachedKeys(cache, 0, visible_slots(cache, positions_BT, 4), 4)
            yield keys.attend(attention, states_BTX, head.rotary(states_BTX, positions_BT))

    read, attend = [], functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda q, k, *rest, **how: read.append(k.shape[2]) or attend(q, k, *rest, **how),
    )
    found = list(outputs())
    assert read[-5:] == [6, 7, 6, 7, 8]  # of rows that are two positions apart; those of a tree read all of it
    monkeypatch.setattr(RowCache, "first_seen", lambda self, window: 0)
    torch.testing.assert_close(found, list(outputs()))


# --- features that wait ------------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


def test_rows_read_their_own_features_again_and_hold_no_others():
    """The feature of position t of row b is 100 b + t."""
    draw = random.Random(0)
    rows, longest = 3, 9
    lengths = [4, longest, 1]
    features_BTF = (100 * torch.arange(rows).view(-1, 1, 1) + torch.arange(longest).view(1, -1, 1)).float()
    pending, first = PendingFeatures(features_BTF, lengths), [0] * rows
    for _ in range(30):
        window = pending.read(RoundInputs.of([list(range(length + 1)) for length in lengths], CounterRNG(0, [0] * rows, CPU)))
        for row, (begin, end) in enumerate(zip(first, lengths, strict=True)):
            expected = [100.0 * row + place for place in range(begin, end)]
            assert window.features_BTF[row, : end - begin, 0].tolist() == expected
            assert window.next_BT[row, : end - begin].tolist() == list(range(begin + 1, end + 1))
        counts = [draw.randint(1, 4) for _ in range(rows)]
        kept = [draw.randint(0, min(2, length - begin)) for begin, length in zip(first, lengths, strict=True)]
        new_BTF = torch.full((rows, 4, 1), -1.0)
        for row, count in enumerate(counts):
            new_BTF[row, :count, 0] = 100 * row + lengths[row] + torch.arange(count)
        pending.move_on(new_BTF, counts, kept)
        first = [length - n for length, n in zip(lengths, kept, strict=True)]
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        # A row may have kept the last columns of a read that was longer than its own.
        assert pending._kept_BSF.shape[1] <= longest + 4

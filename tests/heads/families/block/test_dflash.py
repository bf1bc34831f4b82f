"""DFlash's training forward is the block of the paper, written out slot by slot, at anchors drawn at random."""

import math

import pytest
import torch

from configs.schema.heads import DFlashSettings
from tests.support.family_checks import CONFIGS, SETTINGS, blocks_as_written_out, build, inputs_of, tiny_target
from tests.support.naive_layers import NaiveBody

DFLASH = SETTINGS["dflash"]


@pytest.mark.parametrize("name", sorted(CONFIGS))
@torch.no_grad()
def test_the_training_forward_is_the_block_written_out(name):
    model = tiny_target(name)
    assert len(list(blocks_as_written_out(build(DFLASH, model), model, naive_block))) > 20


def naive_block(head, model, taps_CF, pending, anchor):
    """Return the normed final state of each slot of one block, computed query by query."""
    body = NaiveBody(head, model, norm_heads=True)
    context = [body.norm(head.hidden_norm.weight, head.fc.weight @ taps_F) for taps_F in taps_CF]
    states = [body.embedded(token) for token in [pending] + [DFLASH.mask_token_id] * (DFLASH.block_size - 1)]
    for layer in head.layers:
        normed = [body.norm(layer.input_layernorm.weight, state) for state in states]
        seen = [body.keys_values(layer.self_attn, read, position) for position, read in enumerate(context + normed)]
        slots = zip(states, normed, range(anchor, anchor + len(states)), strict=True)
        states = [body.after(layer, state, read, position, seen) for state, read, position in slots]
    return [body.norm(head.norm.weight, state) for state in states]


def test_depths_weigh_as_their_slots_and_rows_as_the_anchors_they_stand_for():
    model = tiny_target("llama")
    head = build(DFLASH.model_copy(update={"num_anchors": 4}), model).train()
    torch.manual_seed(0)
    depths = head(*inputs_of(model, [list(range(1, 20)), list(range(1, 5))], head.taps))
    assert [depth.weight for depth in depths] == pytest.approx([math.exp(-slot / 4.0) for slot in range(4)])
    # The rows have 17 and 2 anchors that another answer's token follows; 4 of the first are drawn.
    assert depths[0].row_weights_N.tolist() == pytest.approx([17 / 4] * 4 + [1.0] * 2)


def test_a_row_without_anchors_gives_a_loss_of_no_rows_that_can_still_go_backward():
    model = tiny_target("llama")
    head = build(DFLASH, model).train()
    depths = head(*inputs_of(model, [[1, 2, 3]], head.taps, answer_start=2))
    assert [len(depth.origins_N) for depth in depths] == [0] * 4
    sum(depth.hidden_ND.sum() for depth in depths).backward()
    assert not head.fc.weight.grad.any()


def test_nothing_is_left_open_in_the_settings_of_a_built_head():
    deep = type(tiny_target("llama").config)(**CONFIGS["llama"].to_dict() | {"num_hidden_layers": 8, "eos_token_id": [9, 4]})
    head = build(DFlashSettings(kind="dflash", block_size=5), type(tiny_target("llama"))(deep))
    assert (head.settings.taps, head.settings.mask_token_id) == ([2, 4, 5], 9)
    assert (list(head.taps), head.mask_token_id) == ([2, 4, 5], 9)

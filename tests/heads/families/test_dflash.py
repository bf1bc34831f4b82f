"""DFlash drafts what it was trained to draft, and its training forward is the block of the paper, written out slot by slot."""

import math

import pytest
import torch
from torch.nn import functional

from configs.schema.decoding import SamplingConfig
from configs.schema.heads import DFlashSettings
from heads.families.registry import FAMILIES
from heads.modules.layers import shape_like
from heads.sampling.counter_rng import CounterRNG
from heads.target.hidden_states import read_states
from tests.support.family_checks import (
    CONFIGS,
    PROMPTS,
    SOME_TOKENS,
    assert_comes_back,
    assert_gradients_reach_everything,
    build,
    inputs_of,
    tiny_target,
)

SETTINGS = DFlashSettings(kind="dflash", taps=[1, 3], block_size=5, mask_token_id=2)
TARGETS = sorted(CONFIGS)


@pytest.mark.parametrize("name", TARGETS)
def test_the_training_forward_is_the_block_written_out(name):
    model = tiny_target(name)
    head = build(SETTINGS, model)
    batch, states = inputs_of(model, PROMPTS, head.taps)
    T = batch.input_ids_BT.shape[1]
    depths = head(batch, states)
    seen = 0
    for row, prompt in enumerate(PROMPTS):
        taps_TF = states.joined_BTF[row]
        for anchor in range(1, len(prompt) - 1):
            states_SD = naive_block(head, model, taps_TF[:anchor], prompt[anchor], anchor)
            for depth in range(min(SETTINGS.block_size, len(prompt) - anchor) - 1):
                (found,) = (depths[depth].origins_N == row * T + anchor - 1).nonzero().squeeze(1)
                torch.testing.assert_close(depths[depth].hidden_ND[found], states_SD[depth + 1], atol=1e-5, rtol=1e-5)
                assert depths[depth].target_places_N[found] == row * T + anchor + depth
                seen += 1
    assert seen == sum(len(depth.origins_N) for depth in depths)


def naive_block(head, model, taps_CF, pending, anchor):
    """Return the normed final states `[S, D]` of one block, head by head and query by query."""
    context_CD = naive_norm(head.hidden_norm, taps_CF @ head.fc.weight.T)
    ids_S = torch.tensor([pending] + [SETTINGS.mask_token_id] * (SETTINGS.block_size - 1))
    states_SD = model.get_input_embeddings()(ids_S)
    theta = shape_like(model).rope_theta
    for layer in head.layers:
        normed_SD = naive_norm(layer.input_layernorm, states_SD)
        states_SD = states_SD + naive_attention(layer.self_attn, normed_SD, context_CD, anchor, theta)
        read_SD = naive_norm(layer.post_attention_layernorm, states_SD)
        gate, up, down = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight, layer.mlp.down_proj.weight
        states_SD = states_SD + (functional.silu(read_SD @ gate.T) * (read_SD @ up.T)) @ down.T
    return naive_norm(head.norm, states_SD)


def naive_attention(attention, normed_SD, context_CD, anchor, theta):
    H = attention.head_width
    num_heads, num_kv_heads = (len(each.weight) // H for each in (attention.q_proj, attention.k_proj))
    read_RD = torch.cat([context_CD, normed_SD])  # positions 0 to anchor + S - 1
    mixed = []
    for number in range(num_heads):
        rows, kv_rows = (slice(n * H, (n + 1) * H) for n in (number, number // (num_heads // num_kv_heads)))
        keys_RH = naive_norm(attention.k_norm, read_RD @ attention.k_proj.weight[kv_rows].T)
        keys_RH = torch.stack([rotated(key_H, place, theta) for place, key_H in enumerate(keys_RH)])
        values_RH = read_RD @ attention.v_proj.weight[kv_rows].T
        queries_SH = naive_norm(attention.q_norm, normed_SD @ attention.q_proj.weight[rows].T)
        of_head = []
        for slot, query_H in enumerate(queries_SH):
            scores_R = keys_RH @ rotated(query_H, anchor + slot, theta) / math.sqrt(H)
            of_head.append(scores_R.softmax(0) @ values_RH)
        mixed.append(torch.stack(of_head))
    return torch.cat(mixed, 1) @ attention.o_proj.weight.T


def naive_norm(norm, x):
    return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


def rotated(x_H, position, theta):
    """Return x turned by position: each half's number n with its partner in the other half."""
    half = len(x_H) // 2
    angles = position * theta ** (-torch.arange(half, dtype=x_H.dtype) / half)
    first, second = x_H[:half], x_H[half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])


def test_a_block_sees_no_other_block_and_nothing_from_its_anchor_on():
    model = tiny_target("llama")
    head = build(SETTINGS, model)
    batch, states = inputs_of(model, [list(range(10, 30))], head.taps)
    changed = states.map(lambda states_BTE: torch.cat([states_BTE[:, :8], states_BTE[:, 8:] + 1.0], 1))
    ids_BT = torch.cat([batch.input_ids_BT[:, :9], batch.input_ids_BT[:, 9:] + 30], 1)
    for depth, other in zip(head(batch, states), head(batch._replace(input_ids_BT=ids_BT), changed), strict=True):
        equal_N = (depth.hidden_ND == other.hidden_ND).all(-1)
        torch.testing.assert_close(equal_N, depth.origins_N < 8)  # the anchor at 8 reads states up to 7


@pytest.mark.parametrize("reduced", [False, True])
def test_it_comes_back_from_an_artifact(reduced, tmp_path, as_target):
    target = as_target(tiny_target("qwen3"))
    vocabulary = SOME_TOKENS if reduced else None
    settings = SETTINGS.model_copy(update={"train_head": reduced})
    assert_comes_back(tmp_path / "artifact", build(settings, target.model, vocabulary), target, vocabulary)


def test_its_tensors_bear_the_names_that_engines_know():
    layer = [
        "input_layernorm.weight",
        "mlp.down_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{name}.weight" for name in ("k_norm", "k_proj", "o_proj", "q_norm", "q_proj", "v_proj")),
    ]
    head = build(SETTINGS.model_copy(update={"num_layers": 3}), tiny_target("llama"))
    shared = ["fc.weight", "hidden_norm.weight", "norm.weight"]
    assert set(head.state_dict()) == {*shared, *(f"layers.{number}.{name}" for number in range(3) for name in layer)}
    assert head.fc.weight.shape == (32, 2 * 32)
    assert head.layers[0].self_attn.k_norm.weight.shape == (8,)


def test_gradients_reach_everything_and_not_the_target(as_target):
    target = as_target(tiny_target("gemma3"))
    assert_gradients_reach_everything(build(SETTINGS.model_copy(update={"train_head": True}), target.model), target)


def test_it_drafts_no_more_than_its_block_holds_and_the_same_whatever_it_is_asked_for():
    model = tiny_target("llama")
    head = build(SETTINGS, model)
    drafts = {asked: propose(head, model, asked) for asked in (1, 3, 4, 9)}
    assert {asked: proposal.num_drafted for asked, proposal in drafts.items()} == {1: [1], 3: [3], 4: [4], 9: [4]}
    for asked, proposal in drafts.items():
        torch.testing.assert_close(proposal.logits_BGV, drafts[4].logits_BGV[:, :asked])


@torch.no_grad()
def propose(head, model, num_tokens):
    """Return the first proposal after the first prompt."""
    proposer = FAMILIES[head.settings.kind].propose(head, model.device)
    tokens = [[*PROMPTS[0], 1]]
    proposer.start(tokens, 8, read_states(model, torch.tensor(PROMPTS[:1]), proposer.taps))
    return proposer.propose(tokens, num_tokens, SamplingConfig(), CounterRNG(0, [0], model.device), keep_logits=True)


def test_depths_weigh_as_their_slots_and_rows_as_the_anchors_they_stand_for():
    model = tiny_target("llama")
    head = build(SETTINGS.model_copy(update={"num_anchors": 4}), model).train()
    torch.manual_seed(0)
    depths = head(*inputs_of(model, [list(range(1, 20)), list(range(1, 5))], head.taps))
    assert [depth.weight for depth in depths] == pytest.approx([math.exp(-slot / 4.0) for slot in range(4)])
    # The rows have 17 and 2 anchors that another answer's token follows; 4 of the first are drawn.
    assert depths[0].row_weights_N.tolist() == pytest.approx([17 / 4] * 4 + [1.0] * 2)


def test_a_row_without_anchors_gives_a_loss_of_no_rows_that_can_still_go_backward():
    model = tiny_target("llama")
    head = build(SETTINGS, model).train()
    depths = head(*inputs_of(model, [[1, 2, 3]], head.taps, answer_start=2))
    assert [len(depth.origins_N) for depth in depths] == [0] * 4
    sum(depth.hidden_ND.sum() for depth in depths).backward()
    assert head.fc.weight.grad is not None
    assert not head.fc.weight.grad.any()


def test_nothing_is_left_open_in_the_settings_of_a_built_head():
    settings = DFlashSettings(kind="dflash", block_size=5)
    deep = type(tiny_target("llama").config)(**CONFIGS["llama"].to_dict() | {"num_hidden_layers": 8, "eos_token_id": [9, 4]})
    model = type(tiny_target("llama"))(deep)
    head = build(settings, model)
    assert (head.settings.taps, head.settings.mask_token_id) == ([2, 4, 5], 9)
    assert (list(head.taps), head.mask_token_id) == ([2, 4, 5], 9)

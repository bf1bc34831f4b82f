"""DFlash2's layers and selector are the formulas written out, and greedy drafts are the selector's own choice."""

import pytest
import torch
from torch.nn import functional

from configs.runtime.errors import InputError
from heads.inference.causal_lm import head_logits
from tests.support.family_checks import (
    SETTINGS,
    SOME_TOKENS,
    blocks_as_written_out,
    build,
    tiny_target,
)
from tests.support.naive_layers import NaiveBody

DFLASH2 = SETTINGS["dflash2"]


@pytest.mark.parametrize("kernel_size", [1, 3])
@torch.no_grad()
def test_the_training_forward_is_the_block_written_out(kernel_size):
    model = tiny_target("llama")
    head = build(DFLASH2.model_copy(update={"conv_kernel_size": kernel_size}), model)
    for depth, joined_1D, state_D, before in blocks_as_written_out(head, model, naive_block):
        q_V = depth.logits_of(joined_1D)[0].softmax(-1)
        torch.testing.assert_close(q_V, naive_distribution(head, model, state_D, before), atol=1e-5, rtol=1e-4)


def naive_block(head, model, taps_CF, pending, anchor):
    """Return the normed final state of each slot of one block, computed query by query."""
    body = NaiveBody(head, model, norm_heads=True)
    context = [body.norm(head.hidden_norm.weight, head.fc.weight @ taps_F) for taps_F in taps_CF]
    states = [body.embedded(token) for token in [pending] + [DFLASH2.mask_token_id] * (DFLASH2.block_size - 1)]
    for layer in head.layers:
        read = [body.norm(layer.input_layernorm.weight, state) for state in states]
        kernels = [layer.attention_conv.kernel_projection.weight @ each for each in read]
        read = convolved(layer.attention_conv, read, kernels, 0)
        seen = [body.keys_values(layer.self_attn, each, place) for place, each in enumerate(context + read)]
        mixed = [body.attended(layer.self_attn, 0.0, each, anchor + slot, seen) for slot, each in enumerate(read)]
        mixed = convolved(layer.attention_conv, mixed, kernels, 1)
        states = [state + more for state, more in zip(states, mixed, strict=True)]
        read = [body.norm(layer.post_attention_layernorm.weight, state) for state in states]
        kernels = [layer.mlp_conv.kernel_projection.weight @ each for each in read]
        gate, up, down = (each.weight for each in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj))
        read = convolved(layer.mlp_conv, read, kernels, 0)
        mixed = convolved(layer.mlp_conv, [down @ (functional.silu(gate @ x) * (up @ x)) for x in read], kernels, 1)
        states = [state + more for state, more in zip(states, mixed, strict=True)]
    return [body.norm(head.norm.weight, state) for state in states]


def convolved(conv, states, kernels, which):
    """Mix each slot's channels with those of the slots before it, channel by channel."""
    size, width = conv.base_kernel.shape[1:]
    groups = width // conv.group_size
    mixed = [torch.zeros_like(state) for state in states]
    for slot in range(len(states)):
        for back in range(min(size, slot + 1)):
            for channel in range(width):
                made = kernels[slot][(which * size + back) * groups + channel // conv.group_size]
                mixed[slot][channel] += (conv.base_kernel[which, back, channel] + made) * states[slot - back][channel]
    return mixed


def naive_distribution(head, model, state_D, before):
    """Return q over all tokens, candidate by candidate."""
    selector = head.candidate_selector
    context_R = selector.predecessor_codebook[before] * (selector.hidden_projection.weight @ state_D)
    unary_V = head_logits(model, state_D)
    q_V = unary_V.softmax(-1)
    candidates = sorted(range(len(q_V)), key=lambda token: -float(q_V[token]))[: DFLASH2.selector_top_k]
    mass = sum(q_V[token] for token in candidates)
    scores = torch.stack([unary_V[token] + context_R @ selector.successor_codebook[token] for token in candidates])
    for token, share in zip(candidates, scores.softmax(0), strict=True):
        q_V[token] = mass * share
    return q_V


@torch.no_grad()
def test_greedy_drafts_are_the_candidates_of_the_highest_score():
    model, seen = tiny_target("gemma3"), set()
    head = build(DFLASH2, model, SOME_TOKENS)
    head.candidate_selector.successor_codebook.sub_(3.0)  # all scores low: other tokens must not overtake the candidates
    states_ND, before_N = 4 * torch.randn(200, 32, dtype=model.dtype), torch.randint(0, 64, (200,))
    context_NR = head.candidate_selector.context(states_ND, before_N)
    unary_NW = head.lm_head.logits(states_ND)
    best_N = head.correct(unary_NW, torch.cat([states_ND, context_NR], -1)).argmax(-1)
    for unary_W, context_R, best in zip(unary_NW, context_NR, best_N.tolist(), strict=True):
        candidates = unary_W.topk(DFLASH2.selector_top_k).indices.tolist()
        scores = {
            token: float(unary_W[token] + context_R @ head.candidate_selector.successor_codebook[token]) for token in candidates
        }
        assert best == max(scores, key=scores.get)
        seen.add(candidates.index(best))
    assert len(seen) > 2


@torch.no_grad()
def test_settings_that_do_not_fit_the_target_are_refused():
    model = tiny_target("llama")
    with pytest.raises(InputError, match="groups of 12 channels do not divide the width 32"):
        build(DFLASH2.model_copy(update={"conv_group_size": 12}), model)
    with pytest.raises(InputError, match="33 candidates of 32 draft tokens"):
        build(DFLASH2.model_copy(update={"selector_top_k": 33}), model, SOME_TOKENS)

"""Blocks of every kind, written out slot by slot: their layers, how their logits are corrected, and their losses."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from configs.runtime.errors import InputError
from configs.schema.decoding import SamplingConfig
from configs.schema.heads import DFlashSettings
from configs.schema.training import LossConfig
from distill.loss.objectives import HeadObjective
from heads.families.dflash import choose_anchors
from heads.families.registry import FAMILIES
from heads.frozen.hidden_states import read_states
from heads.inference.causal_lm import head_logits
from heads.modules.interface import NO_DOCUMENT, Batch, flat
from heads.proposers.builders import ChainBuilder
from heads.proposers.protocol import RoundInputs
from heads.sampling.draws import CounterRNG
from tests.support.family_checks import (
    CONFIGS,
    PROMPTS,
    SETTINGS,
    SOME_TOKENS,
    blocks_as_written_out,
    build,
    hidden_at,
    inputs_of,
    tiny_target,
    trained_logits,
)
from tests.support.naive_layers import NaiveBody

DFLASH, DSPARK, DFLASH2, XPRESS = (SETTINGS[kind] for kind in ("dflash", "dspark", "dflash2", "xpress"))


# --- layers -------------------------------------------------------------------------------------------------------


def naive_block(head, model, taps_CF, pending, anchor):
    """Return the normed final state of each slot of one block, computed query by query."""
    body = NaiveBody(head, model, norm_heads=True)
    context = [body.norm(head.hidden_norm.weight, head.fc.weight @ taps_F) for taps_F in taps_CF]
    states = [body.embedded(token) for token in [pending] + [head.mask_token_id] * (head.settings.block_size - 1)]
    for layer in head.layers:
        read = [body.norm(layer.input_layernorm.weight, state) for state in states]
        convs = [getattr(layer, name, None) for name in ("attention_conv", "mlp_conv")]
        read, kernels = convolved(convs[0], read, read, 0), read
        seen = [body.keys_values(layer.self_attn, each, place) for place, each in enumerate(context + read)]
        mixed = [body.attended(layer.self_attn, 0.0, each, anchor + slot, seen) for slot, each in enumerate(read)]
        mixed = convolved(convs[0], mixed, kernels, 1)
        states = [state + more for state, more in zip(states, mixed, strict=True)]
        read = [body.norm(layer.post_attention_layernorm.weight, state) for state in states]
        gate, up, down = (each.weight for each in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj))
        read, kernels = convolved(convs[1], read, read, 0), read
        mixed = convolved(convs[1], [down @ (functional.silu(gate @ x) * (up @ x)) for x in read], kernels, 1)
        states = [state + more for state, more in zip(states, mixed, strict=True)]
    return [body.norm(head.norm.weight, state) for state in states]


def convolved(conv, states, kernels_of, which):
    """Mix each slot's channels with those of the slots before it, channel by channel; DFlash has no such convolution."""
    if conv is None:
        return states
    size, width = conv.base_kernel.shape[1:]
    groups = width // conv.group_size
    mixed = [torch.zeros_like(state) for state in states]
    for slot in range(len(states)):
        kernels = conv.kernel_projection.weight @ kernels_of[slot]
        for back in range(min(size, slot + 1)):
            for channel in range(width):
                made = kernels[(which * size + back) * groups + channel // conv.group_size]
                mixed[slot][channel] += (conv.base_kernel[which, back, channel] + made) * states[slot - back][channel]
    return mixed


def selected(head, model, state_D, before):
    """Return DFlash2's distribution over all tokens, candidate by candidate."""
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


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        *((DFLASH, name) for name in sorted(CONFIGS)),
        *((DFLASH2.model_copy(update={"conv_kernel_size": size}), "llama") for size in (1, 3)),
    ],
)
@torch.no_grad()
def test_the_training_forward_is_the_block_written_out(settings, name):
    model = tiny_target(name)
    head, number = build(settings, model), 0
    for depth, joined_1D, state_D, before in blocks_as_written_out(head, model, naive_block):
        number += 1
        if settings.kind == "dflash2":
            q_V = depth.logits_of(joined_1D)[0].softmax(-1)
            torch.testing.assert_close(q_V, selected(head, model, state_D, before), atol=1e-5, rtol=1e-4)
    assert number > 20


def test_depths_weigh_as_their_slots_and_rows_as_the_anchors_they_stand_for():
    model = tiny_target("llama")
    head = build(DFLASH.model_copy(update={"num_anchors": 4, "position_decay": 4.0}), model).train()
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


@torch.no_grad()
def test_nothing_is_left_open_in_the_settings_of_a_built_head_and_what_does_not_fit_is_refused():
    model = tiny_target("llama")
    deep = type(model.config)(**CONFIGS["llama"].to_dict() | {"num_hidden_layers": 8, "eos_token_id": [9, 4]})
    head = build(DFlashSettings(kind="dflash", block_size=5), type(model)(deep))
    assert (head.settings.taps, head.settings.mask_token_id) == ([2, 4, 5], 9)
    with pytest.raises(InputError, match="groups of 12 channels do not divide the width 32"):
        build(DFLASH2.model_copy(update={"conv_group_size": 12}), model)
    with pytest.raises(InputError, match="33 candidates of 32 draft tokens"):
        build(DFLASH2.model_copy(update={"selector_top_k": 33}), model, SOME_TOKENS)


# --- corrected logits ---------------------------------------------------------------------------------------------


def dspark_bias(head, states_SD, prompt, anchor, slot, number):
    w1_VR, w2_WR = (head.markov_head[name].weight for name in ("markov_w1", "markov_w2"))
    return torch.stack([w2_R @ w1_VR[prompt[anchor + number]] for w2_R in w2_WR])


def domino_bias(head, states_SD, prompt, anchor, slot, number):
    """By the state that torch's own GRU has after the tokens from the pending one on; the first draft has none."""
    if number == 0:
        return torch.zeros(head.lm_head.num_tokens, dtype=states_SD.dtype)
    gru = nn.GRU(32, head.settings.gru_hidden_dim, bias=False, dtype=states_SD.dtype)
    gru.load_state_dict(head.prefix_gru.state_dict())
    state_R = gru(head.embed(torch.tensor(prompt[anchor : anchor + number + 1])).unsqueeze(1))[1][0, 0]
    inner, _, outer = head.embed_proj
    return outer.weight @ functional.silu(inner.weight @ torch.cat([states_SD[slot], state_R]))


def xpress_bias(head, states_SD, prompt, anchor, slot, number):
    return refined(head, states_SD, prompt[anchor - head.settings.first_slot :])[slot]


def refined(head, states_SD, before):
    """Return XPress's bias of each slot that a token stands before, slot by slot and channel by channel."""
    refiner, mean_D = head.refiner_head, states_SD.mean(0)
    read = [
        refiner.in_proj.weight
        @ torch.cat([refiner.down_h.weight @ state, refiner.down_g.weight @ mean_D, refiner.token_embed.weight[token]])
        for state, token in zip(states_SD, before, strict=False)
    ]
    biases = []
    for slot, own in enumerate(read):
        mixed = own.clone()
        for channel in range(len(own)):
            mixed[channel] += sum(refiner.mix_l[channel, slot, other] * read[other][channel] for other in range(slot + 1))
        inner = functional.silu(refiner.mlp_gate.weight @ mixed) * (refiner.mlp_up.weight @ mixed)
        biases.append(refiner.readout.weight @ (mixed + refiner.mlp_down.weight @ inner))
    return torch.stack(biases)


def block_of(head, model, prompt, anchor):
    """Return the final states `[S, D]` of the block at a place of a prompt, as drafting fills it."""
    seen = {}
    proposer = FAMILIES[head.settings.kind].propose(head, model.device)
    fill = head.fill
    head.fill = lambda *inputs: seen.setdefault("states", fill(*inputs))
    proposer.start([prompt[: anchor + 1]], 32, read_states(model, torch.tensor([prompt[:anchor]]), head.taps))
    inputs = RoundInputs.of([prompt[: anchor + 1]], CounterRNG(0, [0], model.device))
    proposer.propose(inputs, 1, SamplingConfig(), keep_logits=False)
    del head.fill
    return seen["states"][0]


def built(settings, model, vocabulary=None):
    head = build(settings, model, vocabulary)
    if settings.kind == "xpress":
        with torch.no_grad():
            for each in (head.refiner_head.readout, head.refiner_head.token_embed):
                each.weight.mul_(100.0)  # so that the tokens before decide much
    return head


BIASES = {"dspark": dspark_bias, "domino": domino_bias, "xpress": xpress_bias}


@pytest.mark.parametrize("vocabulary", [None, SOME_TOKENS], ids=["whole", "reduced"])
@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("kind", BIASES)
@torch.no_grad()
def test_logits_are_corrected_by_the_texts_tokens_before_each_slot(kind, from_anchor, vocabulary):
    model, checked = tiny_target("gemma3"), 0  # caps the head's logits, not the correction
    head = built(SETTINGS[kind].model_copy(update={"sample_from_anchor": from_anchor}), model, vocabulary)
    batch, states = inputs_of(model, PROMPTS, head.taps)
    T, first, depths = batch.input_ids_BT.shape[1], head.settings.first_slot, head(batch, states)
    for row, prompt in enumerate(PROMPTS):
        for anchor in range(1, len(prompt) - 1):
            states_SD = block_of(head, model, prompt, anchor)
            for number in range(min(len(depths), len(prompt) - anchor - 1)):
                joined_1D = hidden_at(depths, number, row * T + anchor - 1)
                expected_W = head.lm_head.logits(states_SD[first + number])
                expected_W = expected_W + BIASES[kind](head, states_SD, prompt, anchor, first + number, number)
                torch.testing.assert_close(depths[number].logits_of(joined_1D)[0], expected_W, atol=1e-5, rtol=1e-5)
                checked += 1
    assert checked > 20


def proposal_of(head, model, temperature, num_tokens):
    proposer = FAMILIES[head.settings.kind].propose(head, model.device)
    tokens = [[*PROMPTS[0], 5], [*PROMPTS[0], 9]]
    proposer.start(tokens, 24, read_states(model, torch.tensor([PROMPTS[0]] * 2), proposer.taps))
    inputs = RoundInputs.of(tokens, CounterRNG(4, [0, 1], model.device), num_drafts=num_tokens)
    return tokens, proposer.propose(inputs, num_tokens, SamplingConfig(temperature=temperature), keep_logits=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("passes", [1, 2, 4])
@torch.no_grad()
def test_each_pass_of_xpress_settles_one_more_draft(passes, temperature):
    model = tiny_target("gemma3")
    head = built(XPRESS.model_copy(update={"num_jacobi_passes": passes}), model)
    tokens, proposal = proposal_of(head, model, temperature, 4)
    as_trained_BGW = trained_logits(head, model, tokens, proposal.tokens_BG.tolist())
    settled = head.settings.drafted_as_trained
    torch.testing.assert_close(proposal.logits_BGV[:, :settled], as_trained_BGW[:, :settled], atol=1e-5, rtol=1e-5)
    rest_BGW = (proposal.logits_BGV - as_trained_BGW)[:, settled:].abs()
    assert passes > 1 or float(rest_BGW.max()) > 0.1


@torch.no_grad()
def test_the_estimates_of_a_dspark_proposal_are_those_of_the_training_forward(monkeypatch):
    model = tiny_target("llama")
    head, estimates, add = build(DSPARK, model), [], ChainBuilder.add
    monkeypatch.setattr(ChainBuilder, "add", lambda chain, *drawn: estimates.append(drawn[1]) or add(chain, *drawn))
    tokens, proposal = proposal_of(head, model, 1.0, 3)
    texts = [[*row, *drafts] for row, drafts in zip(tokens, proposal.tokens_BG.tolist(), strict=True)]
    depths = head(*inputs_of(model, texts, head.taps))[:3]
    places = [row * len(texts[0]) + len(PROMPTS[0]) - 1 for row in range(2)]
    logits_BG = torch.stack([torch.cat([depth.confidence_N[depth.origins_N == at] for depth in depths]) for at in places])
    torch.testing.assert_close(torch.stack(estimates, 1), logits_BG.sigmoid(), check_dtype=False)


# --- further terms of the loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "weight", "first"), [("dflash2", "unary_weight", 0), ("domino", "base_weight", 1), ("xpress", "base_weight", 0)]
)
def test_the_logits_without_correction_are_trained_beside_those_with_it(kind, weight, first, as_target):
    target = as_target(tiny_target("llama"))
    settings = SETTINGS[kind].model_copy(update={"position_decay": 4.0})
    head, alone = (build(settings.model_copy(update={weight: each}), target.model).train() for each in (0.5, 0.0))
    batch, states = inputs_of(target.model, PROMPTS, head.taps)
    both, without = (HeadObjective(each, target, LossConfig())(batch, states) for each in (head, alone))
    depths, expected = head(batch, states), 0.0
    for depth in depths[first:]:
        p_NV = head_logits(target.model, flat(states.final_BTE, depth.target_places_N)).log_softmax(-1)
        u_NV = head.lm_head.logits(depth.hidden_ND[:, :32]).log_softmax(-1)
        expected = expected + depth.weight * (p_NV.exp() * (p_NV - u_NV)).sum()
    expected = 0.5 * expected / sum(depth.weight for depth in depths)
    torch.testing.assert_close(both.loss - without.loss, expected, check_dtype=False)
    torch.testing.assert_close(both.values_K, without.values_K)


def test_an_estimate_costs_its_cross_entropy_with_the_acceptance_and_no_gradient_flows_into_that(as_target):
    target = as_target(tiny_target("llama"))
    settings = DSPARK.model_copy(update={"position_decay": 4.0})
    head, silent = (build(settings.model_copy(update={"confidence_weight": w}), target.model).train() for w in (0.7, 0.0))
    batch, states = inputs_of(target.model, PROMPTS, head.taps)
    loss, without = (HeadObjective(each, target, LossConfig())(batch, states).loss for each in (head, silent))
    depths, expected = silent(batch, states), 0.0
    for depth in depths:
        p_NV = head_logits(target.model, flat(states.final_BTE, depth.target_places_N)).softmax(-1)
        q_NV = depth.logits_of(depth.hidden_ND).detach().softmax(-1)
        for row in range(len(depth.origins_N)):
            stays = 1 - 0.5 * (p_NV[row] - q_NV[row]).abs().sum()
            chance = silent.confidence_head["proj"](depth.hidden_ND[row])[0].sigmoid()
            expected = expected - depth.weight * (stays * chance.log() + (1 - stays) * (1 - chance).log())
    expected = expected / sum(depth.weight for depth in depths) * 0.7
    torch.testing.assert_close(loss - without, expected, check_dtype=False)
    gradients, own = (
        torch.autograd.grad(each, list(module.parameters())) for each, module in ((loss, head), (without, silent))
    )
    wanted = torch.autograd.grad(expected, list(silent.parameters()), allow_unused=True)
    for gradient, other, difference in zip(gradients, own, wanted, strict=True):
        difference = torch.zeros_like(gradient) if difference is None else difference
        torch.testing.assert_close(gradient - other, difference, atol=1e-6, rtol=1e-4)


# --- where blocks are drafted -------------------------------------------------------------------------------------

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


def test_all_anchors_are_the_places_that_a_block_would_be_drafted_from():
    nothing, whole = [0] * 17 + [1], [0] + [1] * 17
    anchors = choose_anchors(batch_of([DOCUMENTS, [0] * 18, [0] * 18], [LABELS, nothing, whole]), None)
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

"""XPress's refiner is the formula written out, and its passes settle one draft after another."""

import pytest
import torch
from torch.nn import functional

from configs.schema.decoding import SamplingConfig
from configs.schema.learning import LossConfig
from distill.loss.head_objective import HeadObjective
from heads.families.registry import FAMILIES
from heads.frozen.hidden_states import read_states
from heads.inference.causal_lm import head_logits
from heads.sampling.counter_rng import CounterRNG
from tests.support.family_checks import PROMPTS, SETTINGS, build, hidden_at, inputs_of, tiny_target, trained_logits

XPRESS = SETTINGS["xpress"]


def refined(head, states_SD, before):
    """Return the bias of each slot, slot by slot and channel by channel."""
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
    proposer = FAMILIES["xpress"].propose(head, model.device)
    fill = head.fill
    head.fill = lambda *inputs: seen.setdefault("states", fill(*inputs))
    proposer.start([prompt[: anchor + 1]], 32, read_states(model, torch.tensor([prompt[:anchor]]), head.taps))
    proposer.propose([prompt[: anchor + 1]], 1, SamplingConfig(), CounterRNG(0, [0], model.device), keep_logits=False)
    del head.fill
    return seen["states"][0]


@pytest.fixture
def head():
    head = build(XPRESS, tiny_target("gemma3"))
    with torch.no_grad():
        for each in (head.refiner_head.readout, head.refiner_head.token_embed):
            each.weight.mul_(100.0)  # so that the tokens before decide much
    return head


@torch.no_grad()
def test_the_training_forward_adds_the_bias_of_the_texts_tokens(head):
    model = tiny_target("gemma3")
    batch, states = inputs_of(model, PROMPTS, head.taps)
    T, depths = batch.input_ids_BT.shape[1], head(batch, states)
    for row, prompt in enumerate(PROMPTS[:2]):
        for anchor in range(1, len(prompt) - 1):
            states_SD = block_of(head, model, prompt, anchor)
            bias_SV = refined(head, states_SD, prompt[anchor - 1 :])
            for depth in range(min(XPRESS.block_size, len(prompt) - anchor) - 1):
                joined_1D = hidden_at(depths, depth, row * T + anchor - 1)
                expected_V = head_logits(model, states_SD[depth + 1]) + bias_SV[depth + 1]
                torch.testing.assert_close(depths[depth].logits_of(joined_1D)[0], expected_V, atol=1e-5, rtol=1e-5)


def proposal_of(head, model, temperature, num_tokens=4):
    proposer = FAMILIES["xpress"].propose(head, model.device)
    tokens = [[*PROMPTS[0], 5], [*PROMPTS[0], 9]]
    proposer.start(tokens, 24, read_states(model, torch.tensor([PROMPTS[0]] * 2), proposer.taps))
    rng = CounterRNG(4, [0, 1], model.device)
    return tokens, proposer.propose(tokens, num_tokens, SamplingConfig(temperature=temperature), rng, keep_logits=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("passes", [1, 2, 4])
@torch.no_grad()
def test_each_pass_settles_one_more_draft(passes, temperature, head):
    model = tiny_target("gemma3")
    head.settings = head.settings.model_copy(update={"num_jacobi_passes": passes})
    tokens, proposal = proposal_of(head, model, temperature)
    as_trained_BGW = trained_logits(head, model, tokens, proposal.tokens_BG.tolist())
    settled = head.settings.drafted_as_trained
    torch.testing.assert_close(proposal.logits_BGV[:, :settled], as_trained_BGW[:, :settled], atol=1e-5, rtol=1e-5)
    rest_BGW = (proposal.logits_BGV - as_trained_BGW)[:, settled:].abs()
    assert passes > 1 or float(rest_BGW.max()) > 0.1


@torch.no_grad()
def test_a_pass_reads_what_the_pass_before_gave(head):
    model = tiny_target("gemma3")
    head.settings = head.settings.model_copy(update={"num_jacobi_passes": 2})
    (tokens, _), proposal = proposal_of(head, model, 0.0)
    states_SD = block_of(head, model, tokens, len(tokens) - 1)
    base_GV = head_logits(model, states_SD[1:])
    drafted = base_GV.argmax(-1).tolist()
    for _ in range(2):
        logits_GV = base_GV + refined(head, states_SD, [*tokens[-2:], *drafted[:-1]])[1:]
        drafted = logits_GV.argmax(-1).tolist()
    torch.testing.assert_close(proposal.logits_BGV[0], logits_GV, atol=1e-5, rtol=1e-5)


def test_the_loss_has_the_logits_before_the_refiner_and_those_of_its_own_tokens(as_target):
    model = tiny_target("llama")
    weights = {"consistency_weight": 0.4, "consistency_passes": 2, "base_weight": 0.7, "num_anchors": 50}
    head = build(XPRESS.model_copy(update=weights), model).train()
    silent = build(XPRESS.model_copy(update={"consistency_weight": 0.0, "base_weight": 0.0, "num_anchors": 50}), model).train()
    batch, states = inputs_of(model, [PROMPTS[1]], head.taps)
    loss, without = (
        HeadObjective(each, as_target(model), LossConfig())(batch, states, torch.tensor(7), 1).loss for each in (head, silent)
    )
    depths, prompt, expected = head.eval()(batch, states), PROMPTS[1], 0.0
    with torch.no_grad():
        for anchor in range(1, len(prompt) - 1):
            states_SD = block_of(head, model, prompt, anchor)
            base_GV = head_logits(model, states_SD[1:])
            stages, drafted = [(0.7, base_GV)], base_GV.argmax(-1).tolist()
            for _ in range(2):
                logits_GV = base_GV + refined(head, states_SD, [*prompt[anchor - 1 : anchor + 1], *drafted[:-1]])[1:]
                stages.append((0.2, logits_GV))
                drafted = logits_GV.argmax(-1).tolist()
            for depth in range(min(XPRESS.block_size, len(prompt) - anchor) - 1):
                p_V = head_logits(model, states.final_BTE[0, anchor + depth]).log_softmax(-1)
                for weight, logits_GV in stages:
                    q_V = logits_GV[depth].log_softmax(-1)
                    expected += weight * depths[depth].weight * (p_V.exp() * (p_V - q_V)).sum()
    expected = expected / (7 * sum(depth.weight for depth in depths))
    torch.testing.assert_close((loss - without).detach(), expected, check_dtype=False, atol=1e-5, rtol=1e-4)

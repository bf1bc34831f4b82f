"""DSpark: DFlash with a bias from the token before, and an estimate of its own acceptance that is trained to be true."""

import torch

from configs.schema.decoding import SamplingConfig
from configs.schema.learning import LossConfig
from distill.loss.head_objective import HeadObjective
from heads.families.registry import FAMILIES
from heads.frozen.hidden_states import read_states
from heads.inference.causal_lm import head_logits
from heads.modules.interface import flat
from heads.sampling.counter_rng import CounterRNG
from tests.support.family_checks import PROMPTS, SETTINGS, build, inputs_of, tiny_target

DSPARK = SETTINGS["dspark"]


@torch.no_grad()
def test_the_bias_of_a_slot_is_that_of_the_texts_token_before_it():
    model = tiny_target("gemma3")  # caps the head's logits, not the bias
    head = build(DSPARK, model)
    batch, states = inputs_of(model, PROMPTS, head.taps)
    w1_VR, w2_VR = head.markov_head.markov_w1.weight, head.markov_head.markov_w2.weight
    for slot, depth in enumerate(head(batch, states), start=1):
        logits_NV = depth.logits_of(depth.hidden_ND)
        for row, origin in enumerate(depth.origins_N.tolist()):
            before = int(batch.input_ids_BT.flatten()[origin + slot])
            bias_V = torch.stack([w2_R @ w1_VR[before] for w2_R in w2_VR])
            torch.testing.assert_close(logits_NV[row], head_logits(model, depth.hidden_ND[row, :32]) + bias_V)


def test_the_estimate_costs_its_cross_entropy_with_the_acceptance_and_no_gradient_flows_into_that(as_target):
    target = as_target(tiny_target("llama"))
    head, silent = (build(DSPARK.model_copy(update={"confidence_weight": w}), target.model).train() for w in (0.7, 0.0))
    batch, states = inputs_of(target.model, PROMPTS, head.taps)
    num_labels = torch.tensor(11)
    loss, without = (HeadObjective(each, target, LossConfig())(batch, states, num_labels, 2).loss for each in (head, silent))
    expected = naive_estimate_loss(silent, target.model, batch, states) * 0.7 * 2 / num_labels
    torch.testing.assert_close(loss - without, expected, check_dtype=False)
    gradients, own = (
        torch.autograd.grad(each, list(module.parameters())) for each, module in ((loss, head), (without, silent))
    )
    wanted = torch.autograd.grad(expected, list(silent.parameters()), allow_unused=True)
    for gradient, other, difference in zip(gradients, own, wanted, strict=True):
        difference = torch.zeros_like(gradient) if difference is None else difference
        torch.testing.assert_close(gradient - other, difference, atol=1e-6, rtol=1e-4)


def naive_estimate_loss(head, model, batch, states):
    """Return the sum over slots and rows of the weighted cross-entropy, per unit of label count."""
    depths = head(batch, states)
    total = 0.0
    for depth in depths:
        p_NV = head_logits(model, flat(states.final_BTE, depth.target_places_N)).softmax(-1)
        q_NV = depth.logits_of(depth.hidden_ND).detach().softmax(-1)
        for row in range(len(depth.origins_N)):
            stays = 1 - 0.5 * (p_NV[row] - q_NV[row]).abs().sum()
            chance = head.confidence_head.proj(depth.hidden_ND[row])[0].sigmoid()
            total = total - depth.weight * (stays * chance.log() + (1 - stays) * (1 - chance).log())
    return total / sum(depth.weight for depth in depths)


@torch.no_grad()
def test_the_estimates_of_a_proposal_are_those_of_the_training_forward():
    model = tiny_target("llama")
    head = build(DSPARK, model)
    proposer = FAMILIES["dspark"].propose(head, model.device)
    tokens = [[*PROMPTS[0], 5], [*PROMPTS[0], 9]]
    proposer.start(tokens, 16, read_states(model, torch.tensor([PROMPTS[0]] * 2), proposer.taps))
    rng = CounterRNG(4, [0, 1], model.device)
    proposal = proposer.propose(tokens, 3, SamplingConfig(temperature=1.0), rng, keep_logits=True)
    texts = [[*row, *drafts] for row, drafts in zip(tokens, proposal.tokens_BG.tolist(), strict=True)]
    depths = head(*inputs_of(model, texts, head.taps))[:3]
    places = [row * len(texts[0]) + len(PROMPTS[0]) - 1 for row in range(2)]
    logits_BG = torch.stack([torch.cat([depth.confidence_N[depth.origins_N == at] for depth in depths]) for at in places])
    torch.testing.assert_close(proposal.estimates_BG, logits_BG.sigmoid(), check_dtype=False)

"""DSpark: DFlash with a bias from the token before, and a guess of its own acceptance that is trained to be true."""

import pytest
import torch
from torch.nn import functional

from configs.schema.decoding import SamplingConfig
from configs.schema.heads import DFlashSettings, DSparkSettings
from configs.schema.learning import LossConfig
from distill.loss.head_objective import HeadObjective
from heads.families.registry import FAMILIES
from heads.inference.causal_lm import head_logits
from heads.modules.interface import flat
from heads.sampling.counter_rng import CounterRNG
from heads.target.hidden_states import read_states
from tests.support.family_checks import (
    CONFIGS,
    PROMPTS,
    SOME_TOKENS,
    VOCAB_SIZE,
    assert_comes_back,
    assert_gradients_reach_everything,
    build,
    inputs_of,
    tiny_target,
)

SETTINGS = DSparkSettings(kind="dspark", taps=[1, 3], block_size=5, mask_token_id=2, markov_rank=6)
TARGETS = sorted(CONFIGS)


@pytest.mark.parametrize("reduced", [False, True])
def test_it_comes_back_from_an_artifact(reduced, tmp_path, as_target):
    target = as_target(tiny_target("qwen3"))
    vocabulary = SOME_TOKENS if reduced else None
    assert_comes_back(tmp_path / "artifact", build(SETTINGS, target.model, vocabulary), target, vocabulary)


def test_gradients_reach_everything_and_not_the_target(as_target):
    target = as_target(tiny_target("gpt_neox"))
    assert_gradients_reach_everything(build(SETTINGS.model_copy(update={"train_head": True}), target.model), target)


def test_its_further_tensors_bear_the_names_that_engines_know():
    model = tiny_target("llama")
    plain = build(
        DFlashSettings(**SETTINGS.model_dump(exclude={"kind", "markov_rank", "confidence_weight"}), kind="dflash"), model
    )
    further = {name: tuple(value.shape) for name, value in build(SETTINGS, model, SOME_TOKENS).state_dict().items()}
    own = {name: further[name] for name in further.keys() - plain.state_dict().keys() if not name.startswith("lm_head")}
    assert own == {
        "markov_head.markov_w1.weight": (VOCAB_SIZE, 6),
        "markov_head.markov_w2.weight": (VOCAB_SIZE // 2, 6),
        "confidence_head.proj.weight": (1, 32 + 6),
        "confidence_head.proj.bias": (1,),
    }


def test_an_untrained_bias_leaves_dflashs_logits_as_they_are():
    model = tiny_target("llama")
    settings = DFlashSettings(**SETTINGS.model_dump(exclude={"kind", "markov_rank", "confidence_weight"}), kind="dflash")
    plain, head = build(settings, model, stir=0.0), build(SETTINGS, model, stir=0.0)
    head.load_state_dict(plain.state_dict(), strict=False)
    batch, states = inputs_of(model, PROMPTS, head.taps)
    for depth, expected in zip(head(batch, states), plain(batch, states), strict=True):
        torch.testing.assert_close(depth.logits_of(depth.hidden_ND), expected.logits_of(expected.hidden_ND))


@torch.no_grad()
def test_the_bias_of_a_slot_is_that_of_the_texts_token_before_it():
    model = tiny_target("gemma3")  # caps the head's logits, not the bias
    head = build(SETTINGS, model)
    batch, states = inputs_of(model, PROMPTS, head.taps)
    w1_VR, w2_VR = head.markov_head.markov_w1.weight, head.markov_head.markov_w2.weight
    for slot, depth in enumerate(head(batch, states), start=1):
        logits_NV = depth.logits_of(depth.hidden_ND)
        for row, origin in enumerate(depth.origins_N.tolist()):
            before = int(batch.input_ids_BT.flatten()[origin + slot])
            state_D = depth.hidden_ND[row, :32]
            bias_V = torch.stack([w2_R @ w1_VR[before] for w2_R in w2_VR])
            torch.testing.assert_close(logits_NV[row], head_logits(model, state_D) + bias_V)


def test_the_guess_costs_its_cross_entropy_with_the_acceptance_and_no_gradient_flows_into_that(as_target):
    target = as_target(tiny_target("llama"))
    head = build(SETTINGS.model_copy(update={"confidence_weight": 0.7}), target.model).train()
    silent = build(SETTINGS.model_copy(update={"confidence_weight": 0.0}), target.model).train()
    batch, states = inputs_of(target.model, PROMPTS, head.taps)
    num_labels = torch.tensor(11)
    with_guess = HeadObjective(head, target, LossConfig())(batch, states, num_labels, 2).loss
    without = HeadObjective(silent, target, LossConfig())(batch, states, num_labels, 2).loss
    expected = naive_guess_loss(silent, target.model, batch, states) * 0.7 * 2 / num_labels
    torch.testing.assert_close(with_guess - without, expected, check_dtype=False)
    difference = [
        first - second
        for first, second in zip(
            torch.autograd.grad(with_guess, list(head.parameters())),
            torch.autograd.grad(without, list(silent.parameters())),
            strict=True,
        )
    ]
    wanted = torch.autograd.grad(expected, list(silent.parameters()), allow_unused=True)
    for found, gradient in zip(difference, wanted, strict=True):
        torch.testing.assert_close(found, torch.zeros_like(found) if gradient is None else gradient, atol=1e-6, rtol=1e-4)


def naive_guess_loss(head, model, batch, states):
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
def test_the_guesses_of_a_proposal_are_kept_with_the_proposer():
    model = tiny_target("llama")
    head = build(SETTINGS, model)
    proposer = FAMILIES["dspark"].propose(head, model.device)
    tokens = [[*PROMPTS[0], 5], [*PROMPTS[0], 9]]
    proposer.start(tokens, 16, read_states(model, torch.tensor([PROMPTS[0]] * 2), proposer.taps))
    sampling = SamplingConfig(temperature=1.0)
    proposal = proposer.propose(tokens, 3, sampling, CounterRNG(4, [0, 1], model.device), keep_logits=True)
    texts = [[*row, *drafts] for row, drafts in zip(tokens, proposal.tokens_BG.tolist(), strict=True)]
    depths = head(*inputs_of(model, texts, head.taps))
    place = len(PROMPTS[0]) - 1
    expected_BG = torch.stack(
        [
            torch.stack([depth.confidence_N[depth.origins_N == row * len(texts[0]) + place] for depth in depths[:3]]).squeeze(
                -1
            )
            for row in range(2)
        ]
    ).sigmoid()
    torch.testing.assert_close(proposer.confidences_BG, expected_BG, check_dtype=False)


def test_the_distribution_of_each_draft_follows_the_draft_before_it():
    """Where two rows differ in a drafted token only, the next slot's distributions differ by the bias alone."""
    model = tiny_target("llama")
    head = build(SETTINGS, model)
    proposer = FAMILIES["dspark"].propose(head, model.device)
    tokens = [[*PROMPTS[0], 5]] * 8
    with torch.no_grad():
        proposer.start(tokens, 16, read_states(model, torch.tensor([PROMPTS[0]] * 8), proposer.taps))
        rng = CounterRNG(0, range(8), model.device)
        proposal = proposer.propose(tokens, 2, SamplingConfig(temperature=1.0), rng, keep_logits=True)
    drafted_B = proposal.tokens_BG[:, 0]
    assert len(set(drafted_B.tolist())) > 1
    bias_BV = functional.linear(head.markov_head.markov_w1(drafted_B), head.markov_head.markov_w2.weight)
    backbone_BV = proposal.logits_BGV[:, 1] - bias_BV
    torch.testing.assert_close(backbone_BV, backbone_BV[:1].expand_as(backbone_BV))
    torch.testing.assert_close(proposal.probs_BGV, proposal.logits_BGV.softmax(-1).float(), check_dtype=False)

"""Medusa: each head by itself, the identity before training, and drafting as in training."""

import pytest
import torch
from pydantic import ValidationError

from configs.schema.decoding import SamplingConfig
from configs.schema.heads import MedusaSettings
from heads.families.medusa import MedusaDrafts, ResidualBlocks
from heads.families.registry import FAMILIES
from heads.frozen.hidden_states import read_states
from heads.inference.causal_lm import head_logits
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.probabilities import token_probabilities
from tests.support import family_checks as checks

SHARED, OWN = checks.SETTINGS["medusa"], checks.SETTINGS["medusa, own output heads"]


def naive_blocks(blocks, state_E):
    """One state through its blocks, a number at a time."""
    for layer in blocks.layers:
        before = state_E.tolist()
        state_E = torch.zeros_like(state_E)
        for place, own in enumerate(before):
            x = float(layer.bias[place]) + sum(float(w) * value for w, value in zip(layer.weight[place], before, strict=True))
            state_E[place] = own + x * torch.sigmoid(torch.tensor(x, dtype=torch.float64))
    return state_E


@torch.no_grad()
def test_each_depth_is_its_own_blocks_on_the_state_of_the_origin():
    model = checks.tiny_target("llama")
    head = checks.build(SHARED, model)
    rows = [[7, 12, 3, 44, 9], [20, 9, 31]]
    batch, states = checks.inputs_of(model, rows, head.taps)
    depths = head(batch, states)
    # Row 0 holds x_{j+2+k} for j < 3 - k, row 1 (places 5 to 9) for j < 1 - k.
    assert [depth.origins_N.tolist() for depth in depths] == [[0, 1, 2, 5], [0, 1], [0]]
    assert [depth.target_places_N.tolist() for depth in depths] == [[1, 2, 3, 6], [2, 3], [3]]
    assert [depth.weight for depth in depths] == pytest.approx([1.0, 0.8, 0.64])
    for number, depth in enumerate(depths):
        for place, hidden_E in zip(depth.origins_N.tolist(), depth.hidden_ND, strict=True):
            expected_E = naive_blocks(head.blocks[number], states.final_BTE[place // 5, place % 5])
            torch.testing.assert_close(hidden_E, expected_E)


@torch.no_grad()
@pytest.mark.parametrize("settings", [SHARED, OWN], ids=["shared", "own"])
def test_an_untrained_head_repeats_the_targets_distribution_of_the_next_token(settings):
    model = checks.tiny_target("gemma3")
    head = FAMILIES["medusa"].build(settings, model, None).to(model.dtype)
    batch, states = checks.inputs_of(model, checks.PROMPTS, head.taps)
    logits_PV = head_logits(model, states.final_BTE).flatten(0, 1)
    for depth in head(batch, states):
        logits_NV = depth.logits_of(depth.hidden_ND)  # output heads of their own are float32 copies
        torch.testing.assert_close(logits_NV, logits_PV[depth.origins_N], atol=1e-5, rtol=1e-5)


def test_no_two_blocks_and_no_two_output_heads_share_weights():
    model = checks.tiny_target("llama")
    head = FAMILIES["medusa"].build(OWN.model_copy(update={"num_layers": 3}), model, None)
    parameters = [*head.parameters()]
    assert len(parameters) == 3 * (3 * 2 + 1)
    assert len({parameter.data_ptr() for parameter in parameters}) == len(parameters)
    assert model.get_output_embeddings().weight.data_ptr() not in {parameter.data_ptr() for parameter in parameters}


@torch.no_grad()
def test_the_distribution_of_a_draft_is_the_one_it_was_drawn_from():
    model = checks.tiny_target("llama")
    proposer = MedusaDrafts(checks.build(SHARED, model, checks.SOME_TOKENS), model.device)
    sampling = SamplingConfig(temperature=1.3, top_k=7)
    tokens = [[*checks.PROMPTS[0], 1]] * 300
    proposer.start(tokens, 32, read_states(model, torch.tensor(checks.PROMPTS[:1]), ()).map(lambda x: x.expand(300, -1, -1)))
    proposal = proposer.propose(tokens, 3, sampling, CounterRNG(0, range(300), model.device), keep_logits=True)
    probs_GV = proposal.probs_BGV[0]
    torch.testing.assert_close(proposal.probs_BGV, token_probabilities(proposal.logits_BGV, sampling))
    seen_GV = torch.nn.functional.one_hot(proposal.tokens_BG, 64).float().mean(0)
    assert not seen_GV[probs_GV == 0].any()
    assert (seen_GV - probs_GV).abs().max() < 0.12  # 4 standard deviations


def test_own_output_heads_that_nobody_trains_are_refused():
    with pytest.raises(ValidationError, match="own_output_heads without train_head"):
        MedusaSettings(kind="medusa", own_output_heads=True)


def test_blocks_before_training_are_the_identity_in_float32():
    states_BE = torch.randn(2, 32).bfloat16()
    torch.testing.assert_close(ResidualBlocks(32, 2)(states_BE), states_BE.float(), rtol=0, atol=0)

"""Medusa: each head by itself, the identity before training, and drafting as in training."""

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from configs.schema.decoding import SamplingConfig
from configs.schema.heads import MedusaSettings
from configs.schema.training import HeadsConfig
from heads.artifact import WEIGHTS_FILE
from heads.families.medusa import Medusa, MedusaDrafts, ResidualBlocks
from heads.families.registry import FAMILIES
from heads.inference.causal_lm import head_logits
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.probabilities import token_probabilities
from heads.target.hidden_states import read_states
from tests.support import family_checks as checks

SHARED = MedusaSettings(kind="medusa", num_depths=3, num_layers=2)
OWN = MedusaSettings(kind="medusa", num_depths=3, own_output_heads=True, train_head=True)


@pytest.fixture(scope="module")
def target(as_target):
    return as_target(checks.tiny_target("llama"))


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


def test_no_two_blocks_and_no_two_output_heads_share_weights(target):
    head = FAMILIES["medusa"].build(OWN.model_copy(update={"num_layers": 3}), target.model, None)
    parameters = [*head.parameters()]
    assert len(parameters) == 3 * (3 * 2 + 1)
    assert len({parameter.data_ptr() for parameter in parameters}) == len(parameters)
    assert target.model.get_output_embeddings().weight.data_ptr() not in {parameter.data_ptr() for parameter in parameters}


@pytest.mark.parametrize("settings", [SHARED, OWN, SHARED.model_copy(update={"train_head": True})])
def test_gradients_reach_every_parameter_from_the_first_step(target, settings):
    checks.assert_gradients_reach_everything(checks.build(settings, target.model, stir=0.0), target)


BLOCKS = {f"blocks.{head}.layers.0.{part}" for head in range(3) for part in ("weight", "bias")}


@pytest.mark.parametrize(
    ("settings", "vocabulary", "names"),
    [
        (SHARED, None, BLOCKS | {name.replace("layers.0", "layers.1") for name in BLOCKS}),
        (OWN, None, BLOCKS | {f"lm_heads.{head}.weight" for head in range(3)}),
        (OWN, checks.SOME_TOKENS, BLOCKS | {f"lm_heads.{head}.weight" for head in range(3)}),
    ],
    ids=["shared", "own", "own_reduced"],
)
def test_it_comes_back_from_disk_under_the_names_that_engines_know(tmp_path, target, settings, vocabulary, names):
    checks.assert_comes_back(tmp_path / "head", checks.build(settings, target.model, vocabulary), target, vocabulary)
    assert set(load_file(tmp_path / "head" / WEIGHTS_FILE)) == names


@torch.no_grad()
def test_the_distribution_of_a_draft_is_the_one_it_was_drawn_from(target):
    proposer = MedusaDrafts(checks.build(SHARED, target.model, checks.SOME_TOKENS), target.device)
    sampling = SamplingConfig(temperature=1.3, top_k=7)
    tokens = [[*prompt, 1] for prompt in checks.PROMPTS[:1]]
    proposer.start(tokens, 32, read_states(target.model, torch.tensor(checks.PROMPTS[:1]), ()))
    seen_GV = torch.zeros(3, 64)
    for seed in range(300):
        proposal = proposer.propose(tokens, 3, sampling, CounterRNG(seed, [0], target.device), keep_logits=True)
        seen_GV += torch.nn.functional.one_hot(proposal.tokens_BG[0], 64)
    torch.testing.assert_close(proposal.probs_BGV, token_probabilities(proposal.logits_BGV, sampling))
    assert (seen_GV[proposal.probs_BGV[0] == 0] == 0).all()
    assert (seen_GV / 300 - proposal.probs_BGV[0]).abs().max() < 0.12  # 4 standard deviations


def test_it_drafts_no_more_tokens_than_it_has_heads(target):
    proposer = MedusaDrafts(checks.build(SHARED, target.model), target.device)
    proposer.start([[*prompt, 1] for prompt in checks.PROMPTS[:1]], 32, read_states(target.model, torch.tensor([[1] * 5]), ()))
    proposal = proposer.propose([[1] * 6], 5, SamplingConfig(), CounterRNG(0, [0], target.device), keep_logits=False)
    assert proposal.num_drafted == [3]
    assert proposal.tokens_BG.shape == (1, 3)


@pytest.mark.parametrize("where", ["num_speculative_tokens", "held_out.decode.num_speculative_tokens"])
def test_a_run_that_asks_for_more_drafts_than_heads_is_refused(where):
    config = {"head": {"kind": "medusa", "num_depths": 4}, "num_speculative_tokens": 4}
    HeadsConfig.model_validate(config)
    more = {"num_speculative_tokens": 5} if where == "num_speculative_tokens" else {"held_out": {"decode": {where[16:]: 5}}}
    with pytest.raises(ValidationError, match=f"{where} must be at most 4"):
        HeadsConfig.model_validate(config | more)


def test_own_output_heads_that_nobody_trains_are_refused():
    with pytest.raises(ValidationError, match="own_output_heads without train_head"):
        MedusaSettings(kind="medusa", own_output_heads=True)


def test_blocks_before_training_are_the_identity_in_float32():
    states_BE = torch.randn(2, 32).bfloat16()
    torch.testing.assert_close(ResidualBlocks(32, 2)(states_BE), states_BE.float(), rtol=0, atol=0)


def test_the_family_is_registered_as_what_it_is():
    assert FAMILIES["medusa"].build is Medusa

"""MTP: a module around a block of the target's own family, unrolled as it drafts, or one module for each depth."""

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.runtime.errors import InputError
from configs.schema.decoding import SamplingConfig
from configs.schema.heads import MtpSettings
from heads.families.mtp import Mtp
from heads.families.registry import FAMILIES
from heads.frozen.hidden_states import final_norm, read_states
from heads.inference.runner import backbone
from heads.sampling.counter_rng import CounterRNG
from tests.support import family_checks as checks

SHARED, OWN = checks.SETTINGS["mtp"], checks.SETTINGS["mtp, a module a depth"]
KINDS = pytest.mark.parametrize("settings", [SHARED, OWN], ids=["shared", "own"])
FAMILY_NAMES = pytest.mark.parametrize("name", checks.CONFIGS)


@pytest.fixture(scope="module")
def target(as_target):
    return as_target(checks.tiny_target("llama"))


def changed(settings, **values):
    return MtpSettings.model_validate(settings.model_dump() | values)


# --- the training forward against models of transformers that know nothing of heads -------------------------------


def one_block_model(model, block, norm, number):
    """Return a function from embeddings `[T, D]` to normed states `[T, D]`: transformers' own model, with one block."""
    config = deepcopy(model.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [model.config.layer_types[number]]
        if isinstance(config.rope_parameters.get(config.layer_types[0]), dict):
            config.rope_parameters = {config.layer_types[0]: config.rope_parameters[config.layer_types[0]]}
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    backbone(whole).layers[0].load_state_dict(block.state_dict())
    final_norm(whole).load_state_dict(norm.state_dict())
    return lambda embedded_TD: backbone(whole)(inputs_embeds=embedded_TD.unsqueeze(0), use_cache=False).last_hidden_state[0]


def fused(layer, model, token, state_D, *, hidden_first):
    """Return what the module's block reads of one token and one state."""
    parts = [layer.enorm(model.get_input_embeddings()(torch.tensor(token))), layer.hnorm(state_D)]
    return layer.eh_proj(torch.cat(parts[::-1] if hidden_first else parts))


def naive_shared(head, model, ids, states_TD, origin, num_depths, number, hidden_first):
    """Return the states of one origin's chain: the whole sequence run again from its start for every depth."""
    (layer,) = head.layers
    run = one_block_model(model, layer.mtp_block, layer.post_norm, number)
    sequence = [fused(layer, model, ids[t + 1], states_TD[t], hidden_first=hidden_first) for t in range(origin + 1)]
    states = [run(torch.stack(sequence))[-1]]
    for depth in range(1, num_depths):
        sequence.append(fused(layer, model, ids[origin + 1 + depth], states[-1], hidden_first=hidden_first))
        states.append(run(torch.stack(sequence))[-1])
    return states


def naive_own(head, model, ids, states_TD, origin, num_depths, number, hidden_first):
    """Return the states at one origin of one module after the other, each run over the whole text up to there."""
    states = []
    for depth, layer in enumerate(head.layers[:num_depths]):
        run = one_block_model(model, layer.mtp_block, layer.post_norm, number)
        sequence = [fused(layer, model, ids[t + 1 + depth], states_TD[t], hidden_first=hidden_first) for t in range(origin + 1)]
        states_TD = run(torch.stack(sequence))
        states.append(states_TD[-1])
    return states


def assert_states_are_naive(head, model, number, tolerance=1e-5, *, hidden_first=False, pre_norm=False):
    ids = checks.PROMPTS[1]
    batch, states = checks.inputs_of(model, [ids], head.taps)
    depths = head(batch, states)
    states_TD = (states.taps_ABTE[0] if pre_norm else states.final_BTE)[0]
    naive, seen = naive_shared if head.settings.shared_depths else naive_own, 0
    for origin in range(len(ids) - 2):
        num_depths = min(3, len(ids) - 2 - origin)
        expected = naive(head, model, ids, states_TD, origin, num_depths, number, hidden_first)
        for depth, state_D in enumerate(expected):
            torch.testing.assert_close(
                checks.hidden_at(depths, depth, origin)[0], state_D, atol=tolerance, rtol=tolerance, msg=f"{origin} {depth}"
            )
            seen += 1
    assert seen == sum(len(depth.origins_N) for depth in depths)


@torch.no_grad()
@KINDS
@FAMILY_NAMES
def test_states_are_those_of_the_targets_own_model_run_origin_by_origin(name, settings):
    model = checks.tiny_target(name)
    assert_states_are_naive(checks.build(settings, model), model, number=3)


@torch.no_grad()
@KINDS
def test_a_sliding_block_sees_its_window_and_no_more(settings):
    model = checks.tiny_target("gemma3")  # block 2 slides over 5 positions, fewer than the text has
    assert_states_are_naive(checks.build(changed(settings, init_block=2), model), model, number=2)


@torch.no_grad()
@pytest.mark.parametrize(
    ("values", "told"),
    [({"concat_order": "hidden_first"}, {"hidden_first": True}), ({"reads": "pre_norm"}, {"pre_norm": True})],
)
def test_order_and_place_of_what_is_read_are_as_set(values, told):
    model = checks.tiny_target("gemma3")
    assert_states_are_naive(checks.build(changed(SHARED, **values), model), model, number=3, **told)


# --- what every family has to show --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values", [{"init_block": 2}, {"shared_depths": False, "init_block": 2}, {"num_depths": 5, "shared_depths": False}]
)
def test_it_drafts_as_it_was_trained_in_a_window_and_with_depths_to_spare(values):
    model = checks.tiny_target("gemma3")
    checks.assert_drafts_as_trained(checks.build(changed(SHARED, **values), model), model, tolerance=1e-4)


@KINDS
def test_it_drafts_as_it_was_trained_under_eager_attention(settings):
    model = deepcopy(checks.tiny_target("gemma3"))
    model.set_attn_implementation("eager")
    checks.assert_drafts_as_trained(checks.build(changed(settings, init_block=2), model), model, tolerance=1e-4)


@KINDS
def test_two_conversations_in_one_row_are_two_conversations_in_a_window(settings):
    model = checks.tiny_target("gemma3")
    checks.assert_documents_are_apart(checks.build(changed(settings, init_block=2), model), model)


# --- how it starts, and what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(("init_block", "number"), [(None, 3), (1, 1)])
def test_the_block_starts_as_one_of_the_targets_and_the_last_norm_as_its_final_one(target, init_block, number):
    head = FAMILIES["mtp"].build(changed(OWN, init_block=init_block), target.model, None)
    for layer in head.layers:
        for name, value in target.model.model.layers[number].state_dict().items():
            copied = layer.mtp_block.state_dict()[name]
            assert torch.equal(copied, value)
            assert copied.data_ptr() != value.data_ptr()
        assert torch.equal(layer.post_norm.weight, target.model.model.norm.weight)
    assert len({parameter.data_ptr() for parameter in head.parameters()}) == len(list(head.parameters()))


def test_a_block_that_the_target_does_not_have_is_refused(target):
    with pytest.raises(InputError, match=r"head\.init_block 4: the target's blocks are 0 to 3"):
        Mtp(changed(SHARED, init_block=4), target.model, None)


@torch.no_grad()
def test_modules_that_did_not_read_along_stay_out(target):
    head = checks.build(OWN, target.model)
    proposer = FAMILIES["mtp"].propose(head, target.device)
    tokens, rng = [[*checks.PROMPTS[0], 1]], CounterRNG(0, [0], target.device)
    proposer.start(tokens, 32, read_states(target.model, torch.tensor(checks.PROMPTS[:1]), ()))
    counts = []
    for asked in (5, 1, 3):
        proposal = proposer.propose(tokens, asked, SamplingConfig(), rng, keep_logits=False)
        counts.append(proposal.num_drafted)
        tokens = [[*tokens[0], 2]]
        proposer.commit([0], read_states(target.model, torch.tensor(tokens)[:, -2:-1], ()))
    assert counts == [[3], [1], [1]]

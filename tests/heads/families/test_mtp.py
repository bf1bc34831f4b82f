"""MTP: a module around a block of the target's own family, unrolled as it drafts."""

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.schema.heads import MtpSettings
from heads.families.registry import FAMILIES
from heads.frozen.hidden_states import final_norm
from heads.inference.runner import backbone
from tests.support import family_checks as checks

MTP = checks.SETTINGS["mtp"]


@pytest.fixture(scope="module")
def target(as_target):
    return as_target(checks.tiny_target("llama"))


def changed(settings, **values):
    return MtpSettings.model_validate(settings.model_dump() | values)


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


def naive_states(head, model, ids, states_TD, origin, num_depths, number):
    """Return the states at an origin by depth: the whole text up to there run again, with the chain after it."""
    states, layer = [], head.layers[0]

    def fused(token, state_D):
        parts = [layer.enorm(model.get_input_embeddings()(torch.tensor(token))), layer.hnorm(state_D)]
        return layer.eh_proj(torch.cat(parts))

    run = one_block_model(model, layer.mtp_block, layer.post_norm, number)
    sequence = [fused(ids[t + 1], states_TD[t]) for t in range(origin + 1)]
    for depth in range(num_depths):
        if depth > 0:
            sequence.append(fused(ids[origin + 1 + depth], states[-1]))
        states.append(run(torch.stack(sequence))[-1])
    return states


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, {}) for name in checks.CONFIGS),
        ("gemma3", {"init_block": 2}),  # which slides over 5 positions, fewer than the text has
        ("gemma3", {"reads": "pre_norm"}),
    ],
)
def test_states_are_those_of_the_targets_own_model_run_origin_by_origin(name, values):
    model, ids, seen = checks.tiny_target(name), checks.PROMPTS[1], 0
    head = checks.build(changed(MTP, **values), model)
    batch, states = checks.inputs_of(model, [ids], head.taps)
    depths = head(batch, states)
    states_TD = (states.taps_ABTE[0] if "reads" in values else states.final_BTE)[0]
    for origin in range(len(ids) - 2):
        num_depths = min(3, len(ids) - 2 - origin)
        expected = naive_states(head, model, ids, states_TD, origin, num_depths, values.get("init_block", 3))
        for depth, state_D in enumerate(expected):
            torch.testing.assert_close(checks.hidden_at(depths, depth, origin)[0], state_D, atol=1e-5, rtol=1e-5)
            seen += 1
    assert seen == sum(len(depth.origins_N) for depth in depths)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_it_drafts_as_it_was_trained_in_a_window(attention):
    model = deepcopy(checks.tiny_target("gemma3"))
    model.set_attn_implementation(attention)
    head = checks.build(changed(MTP, init_block=2), model)
    checks.assert_drafts_as_trained(head, model, tolerance=1e-4)
    checks.assert_documents_are_apart(head, model)


@pytest.mark.parametrize(("init_block", "number"), [(None, 3), (1, 1)])
def test_the_block_starts_as_one_of_the_targets_and_the_last_norm_as_its_final_one(target, init_block, number):
    head = FAMILIES["mtp"].build(changed(MTP, init_block=init_block), target.model, None)
    for layer in head.layers:
        for name, value in target.model.model.layers[number].state_dict().items():
            copied = layer.mtp_block.state_dict()[name]
            assert torch.equal(copied, value)
            assert copied.data_ptr() != value.data_ptr()
        assert torch.equal(layer.post_norm.weight, target.model.model.norm.weight)
    assert len({parameter.data_ptr() for parameter in head.parameters()}) == len(list(head.parameters()))

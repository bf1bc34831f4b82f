"""Hydra: each head reads the tokens before its own, in training the text's and when drafting the drafted ones."""

import pytest
import torch
from torch.nn.functional import silu

from heads.families.registry import FAMILIES
from heads.inference.causal_lm import head_logits
from tests.support import family_checks as checks
from tests.support.naive_layers import NaiveBody

PLAIN, PREFIX, PUBLISHED = (checks.SETTINGS[name] for name in ("hydra", "hydra, prefix", "hydra, published"))


def naive_head(blocks, parts):
    """What one head makes of a state and embeddings."""
    read_F = torch.cat(parts)
    first, residual = blocks.linear, blocks.res_connection
    state_E = residual.weight @ read_F + residual.bias + silu(first.weight @ read_F + first.bias)
    for layer in blocks.blocks.layers:
        state_E = state_E + silu(layer.weight @ state_E + layer.bias)
    return state_E


def naive_prefix(body, states):
    """The prefix layer over one conversation, a position after the other."""
    return [body.add(None, state_E, position, range(position))[1] for position, state_E in enumerate(states)]


@pytest.mark.parametrize(
    ("settings", "name"), [(PLAIN, "qwen3"), (PREFIX, "qwen3"), (PREFIX, "gpt_neox"), (PUBLISHED, "qwen3")]
)
@torch.no_grad()
def test_each_depth_reads_the_state_of_the_origin_and_the_tokens_after_it(settings, name):
    model = checks.tiny_target(name)
    head = checks.build(settings, model)
    rows = [[7, 12, 3, 44, 9, 30], [20, 9, 31, 2]]
    batch, states = checks.inputs_of(model, rows, head.taps)
    embedding = model.get_input_embeddings()
    read = [list(states.final_BTE[number, : len(row)]) for number, row in enumerate(rows)]
    if settings.prefix_attention:
        read = [naive_prefix(NaiveBody(head, model, [head.prefix_layer]), row) for row in read]
    if settings.prefix_norm:
        body = NaiveBody(head, model, [])
        read = [[body.norm(head.prefix_norm.weight, state_E) for state_E in row] for row in read]
    depths = head(batch, states)
    assert [depth.origins_N.tolist() for depth in depths] == [[0, 1, 2, 3, 6, 7], [0, 1, 2, 6], [0, 1]]
    for number, depth in enumerate(depths):
        assert (depth.target_places_N == depth.origins_N + number + 1).all()
        for place, hidden_E in zip(depth.origins_N.tolist(), depth.hidden_ND, strict=True):
            row, origin = divmod(place, 6)
            known = [embedding(torch.tensor(rows[row][origin + 1 + ahead])) for ahead in range(number + 1)]
            expected_E = naive_head(head.blocks[number], [read[row][origin], *known])
            # transformers turns queries and keys by float32 angles, whatever the dtype.
            torch.testing.assert_close(hidden_E, expected_E, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_own_output_heads_give_each_their_depth():
    model = checks.tiny_target("llama")
    head = checks.build(PUBLISHED, model)
    depths = head(*checks.inputs_of(model, checks.PROMPTS, head.taps))
    for number, depth in enumerate(depths):
        own = head.lm_heads[number]
        torch.testing.assert_close(depth.logits_of(depth.hidden_ND), depth.hidden_ND @ own.weight.T + own.bias)


@torch.no_grad()
def test_an_untrained_head_repeats_the_targets_distribution_of_the_next_token():
    model = checks.tiny_target("gemma3")
    head = FAMILIES["hydra"].build(PLAIN, model, None).to(model.dtype)
    batch, states = checks.inputs_of(model, checks.PROMPTS, head.taps)
    logits_PV = head_logits(model, states.final_BTE).flatten(0, 1)
    for depth in head(batch, states):
        torch.testing.assert_close(depth.logits_of(depth.hidden_ND), logits_PV[depth.origins_N])


def test_no_two_blocks_share_weights():
    head = FAMILIES["hydra"].build(PLAIN.model_copy(update={"num_layers": 3}), checks.tiny_target("llama"), None)
    parameters = list(head.parameters())
    assert len(parameters) == 3 * (4 + 3 * 2)
    assert len({parameter.data_ptr() for parameter in parameters}) == len(parameters)

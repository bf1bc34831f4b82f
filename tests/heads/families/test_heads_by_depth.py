"""Medusa and Hydra: each depth's blocks written out, and the target's own distribution before training."""

import pytest
import torch
from torch.nn.functional import silu

from heads.families.registry import FAMILIES
from heads.inference.causal_lm import head_logits
from tests.support import family_checks as checks
from tests.support.naive_layers import NaiveBody

MEDUSA, OWN, HYDRA, PREFIX, WINDOW = (
    checks.SETTINGS[name] for name in ("medusa", "medusa, own output heads", "hydra", "hydra, prefix", "hydra, window")
)
ROWS = [[7, 12, 3, 44, 9, 30], [20, 9, 31, 2]]


def residual(layers, state_E):
    for layer in layers:
        state_E = state_E + silu(layer.weight @ state_E + layer.bias)
    return state_E


def naive_head(blocks, state_E, embedded):
    """What one head makes of a state and the embeddings of the tokens after it, which Medusa does not read."""
    if not hasattr(blocks, "linear"):
        return residual(blocks.layers, state_E)
    read_F = torch.cat([state_E, *embedded])
    first, skip = blocks.linear, blocks.res_connection
    return residual(blocks.blocks.layers, skip.weight @ read_F + skip.bias + silu(first.weight @ read_F + first.bias))


@pytest.mark.parametrize(
    ("settings", "name"),
    [(MEDUSA, "llama"), (OWN, "llama"), (HYDRA, "qwen3"), (PREFIX, "gpt_neox"), (WINDOW, "llama")],
)
@torch.no_grad()
def test_each_depth_is_its_own_blocks_on_the_state_of_the_origin_and_the_tokens_after_it(settings, name):
    model = checks.tiny_target(name)
    head = checks.build(settings, model)
    batch, states = checks.inputs_of(model, ROWS, head.taps)
    embedding, read = model.get_input_embeddings(), [list(states.final_BTE[n, : len(row)]) for n, row in enumerate(ROWS)]
    if getattr(settings, "prefix_attention", False):
        bodies = [NaiveBody(head, model, [head.prefix_layer]) for _ in ROWS]
        window = settings.window or len(ROWS[0])
        read = [
            [body.add(None, x, n, range(max(0, n + 1 - window), n))[1] for n, x in enumerate(row)]
            for body, row in zip(bodies, read, strict=True)
        ]
    depths = head(batch, states)
    assert [depth.origins_N.tolist() for depth in depths] == [[0, 1, 2, 3, 6, 7], [0, 1, 2, 6], [0, 1]]
    assert [depth.weight for depth in depths] == pytest.approx([1.0, 0.8, 0.64])
    for number, depth in enumerate(depths):
        assert (depth.target_places_N == depth.origins_N + number + 1).all()
        for place, hidden_E in zip(depth.origins_N.tolist(), depth.hidden_ND, strict=True):
            row, origin = divmod(place, 6)
            embedded = [embedding(torch.tensor(ROWS[row][origin + 1 + ahead])) for ahead in range(number + 1)]
            if getattr(settings, "norm_embeddings", False):
                embedded = [NaiveBody(head, model, []).norm(head.embedding_norm.weight, each) for each in embedded]
            expected_E = naive_head(head.blocks[number], read[row][origin], embedded)
            # transformers turns queries and keys by float32 angles, whatever the dtype.
            torch.testing.assert_close(hidden_E, expected_E, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("settings", [MEDUSA, OWN, HYDRA], ids=["medusa", "own output heads", "hydra"])
def test_an_untrained_head_repeats_the_targets_distribution_of_the_next_token(settings):
    model = checks.tiny_target("gemma3")
    head = FAMILIES[settings.kind].build(settings, model, None).to(model.dtype)
    batch, states = checks.inputs_of(model, checks.PROMPTS, head.taps)
    logits_PV = head_logits(model, states.final_BTE).flatten(0, 1)
    for depth in head(batch, states):
        logits_NV = depth.logits_of(depth.hidden_ND)  # output heads of their own are float32 copies
        torch.testing.assert_close(logits_NV, logits_PV[depth.origins_N], atol=1e-5, rtol=1e-5)

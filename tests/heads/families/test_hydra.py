"""Hydra: each head reads the tokens before its own, in training the text's and when drafting the drafted ones."""

import math

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch.nn.functional import silu

from configs.schema.heads import HydraSettings
from configs.schema.training import HeadsConfig
from heads.artifact import WEIGHTS_FILE
from heads.families.registry import FAMILIES
from heads.inference.causal_lm import head_logits
from heads.modules.layers import shape_like
from tests.support import family_checks as checks

PLAIN = HydraSettings(kind="hydra", num_depths=3, num_layers=2)
PREFIX = HydraSettings(kind="hydra", num_depths=3, prefix_attention=True)
PUBLISHED = HydraSettings(
    kind="hydra", num_depths=3, num_layers=2, prefix_attention=True, prefix_norm=True, own_output_heads=True, train_head=True
)
BOTH = pytest.mark.parametrize("settings", [PLAIN, PREFIX, PUBLISHED], ids=["plain", "prefix", "published"])


@pytest.fixture(scope="module")
def target(as_target):
    return as_target(checks.tiny_target("llama"))


def naive_norm(norm, state_E, epsilon):
    return norm.weight * state_E / torch.sqrt((state_E * state_E).mean() + epsilon)


def naive_rotation(state_H, position, theta):
    """Turn the pairs (i, i + H/2) of one head's query or key by position * theta^(-2i/H)."""
    half = len(state_H) // 2
    turned_H = torch.zeros_like(state_H)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(state_H))
        x, y = state_H[i], state_H[i + half]
        turned_H[i] = x * math.cos(angle) - y * math.sin(angle)
        turned_H[i + half] = y * math.cos(angle) + x * math.sin(angle)
    return turned_H


def naive_prefix(layer, shape, states):
    """The prefix layer over one conversation, a position and a head at a time."""
    N, M, H = shape.num_heads, shape.num_key_value_heads, shape.head_width
    attention = layer.self_attn
    normed = [naive_norm(layer.input_layernorm, state_E, shape.norm_epsilon) for state_E in states]
    after = []
    for t, state_E in enumerate(states):
        mixed = []
        for n in range(N):
            m = n * M // N
            q_H = naive_rotation((attention.q_proj.weight @ normed[t])[n * H : (n + 1) * H], t, shape.rope_theta)
            keys = [
                naive_rotation((attention.k_proj.weight @ normed[s])[m * H : (m + 1) * H], s, shape.rope_theta)
                for s in range(t + 1)
            ]
            weights = torch.stack([q_H @ key_H / math.sqrt(H) for key_H in keys]).softmax(0)
            values = [(attention.v_proj.weight @ normed[s])[m * H : (m + 1) * H] for s in range(t + 1)]
            mixed.append(sum(weight * value_H for weight, value_H in zip(weights, values, strict=True)))
        state_E = state_E + attention.o_proj.weight @ torch.cat(mixed)
        read_E = naive_norm(layer.post_attention_layernorm, state_E, shape.norm_epsilon)
        gated = silu(layer.mlp.gate_proj.weight @ read_E) * (layer.mlp.up_proj.weight @ read_E)
        after.append(state_E + layer.mlp.down_proj.weight @ gated)
    return after


def naive_head(blocks, parts):
    """What one head makes of a state and embeddings."""
    read_F = torch.cat(parts)
    first, residual = blocks.linear, blocks.res_connection
    state_E = residual.weight @ read_F + residual.bias + silu(first.weight @ read_F + first.bias)
    for layer in blocks.blocks.layers:
        state_E = state_E + silu(layer.weight @ state_E + layer.bias)
    return state_E


@BOTH
@pytest.mark.parametrize("name", ["qwen3", "gpt_neox"])
@torch.no_grad()
def test_each_depth_reads_the_state_of_the_origin_and_the_tokens_after_it(settings, name):
    model = checks.tiny_target(name)
    head = checks.build(settings, model)
    rows = [[7, 12, 3, 44, 9, 30], [20, 9, 31, 2]]
    batch, states = checks.inputs_of(model, rows, head.taps)
    embedding = model.get_input_embeddings()
    read = [list(states.final_BTE[number, : len(row)]) for number, row in enumerate(rows)]
    if settings.prefix_attention:
        read = [naive_prefix(head.prefix_layer, shape_like(model), row) for row in read]
    if settings.prefix_norm:
        epsilon = shape_like(model).norm_epsilon
        read = [[naive_norm(head.prefix_norm, state_E, epsilon) for state_E in row] for row in read]
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
def test_own_output_heads_say_each_their_depth(target):
    head = checks.build(PUBLISHED, target.model)
    depths = head(*checks.inputs_of(target.model, checks.PROMPTS, head.taps))
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


def test_no_two_blocks_share_weights(target):
    head = FAMILIES["hydra"].build(PLAIN.model_copy(update={"num_layers": 3}), target.model, None)
    parameters = list(head.parameters())
    assert len(parameters) == 3 * (4 + 3 * 2)
    assert len({parameter.data_ptr() for parameter in parameters}) == len(parameters)


def test_greedy_output_is_the_targets_own_with_more_drafts_asked_for_than_heads(target):
    checks.assert_greedy_output_is_plain(checks.build(PREFIX, target.model), target, num_tokens=5)


@BOTH
def test_gradients_reach_every_parameter_from_the_first_step(target, settings):
    trained = settings.model_copy(update={"train_head": True})
    checks.assert_gradients_reach_everything(checks.build(trained, target.model, stir=0.0), target)


FIRST = {f"blocks.{n}.{name}.{part}" for n in range(3) for name in ("res_connection", "linear") for part in ("weight", "bias")}
LATER = {f"blocks.{n}.blocks.layers.0.{part}" for n in range(3) for part in ("weight", "bias")}
ATTENTION = {f"prefix_layer.self_attn.{name}_proj.weight" for name in "qkvo"}
MLP = {f"prefix_layer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
NORMS = {f"prefix_layer.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")}


@pytest.mark.parametrize(
    ("settings", "vocabulary", "names"),
    [
        (PLAIN, None, FIRST | LATER | {name.replace("layers.0", "layers.1") for name in LATER}),
        (PREFIX, checks.SOME_TOKENS, FIRST | LATER | ATTENTION | MLP | NORMS | {"lm_head.weight"}),
    ],
    ids=["plain", "prefix_reduced"],
)
def test_it_comes_back_from_disk(tmp_path, target, settings, vocabulary, names):
    checks.assert_comes_back(tmp_path / "head", checks.build(settings, target.model, vocabulary), target, vocabulary)
    assert set(load_file(tmp_path / "head" / WEIGHTS_FILE)) == names


def test_a_run_that_asks_for_more_drafts_than_heads_is_refused():
    with pytest.raises(ValidationError, match=r"num_speculative_tokens must be at most 2, what a hydra head .* got 3"):
        HeadsConfig.model_validate({"head": {"kind": "hydra", "num_depths": 2}, "num_speculative_tokens": 3})

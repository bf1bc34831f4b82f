"""EAGLE-3 drafts as trained; its training forward is the unrolled chain, and its attention that under a dense mask."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from configs.runtime.errors import InputError
from configs.schema.heads import Eagle3Settings, LayerSettings
from heads.artifact import WEIGHTS_FILE
from heads.families.eagle3 import Eagle3, UnrolledKeys, default_taps
from heads.families.registry import serve
from heads.modules.initialization import copy_block
from heads.modules.layers import DraftAttention, LayerShape, Rotary, causal_mask
from heads.target.hidden_states import blocks, final_norm
from tests.support import family_checks as checks
from tests.support.naive_eagle import NaiveBody

PLAIN = Eagle3Settings(kind="eagle3", taps=[1, 2, 4], num_depths=3)
ALL_OPTIONS = PLAIN.model_copy(
    update={"num_layers": 2, "norm_taps": True, "norm_before_residual": True, "norm_feedback": True, "taps": [0, 3]}
)
OWN_LAYER = LayerSettings(
    mlp_width=20,
    num_heads=8,
    num_key_value_heads=2,
    head_width=6,
    norm_epsilon=1e-3,
    rope_theta=500.0,
    rope_scaling={"rope_type": "linear", "factor": 2.0},
)
OWN_PARTS = PLAIN.model_copy(update={"layer": OWN_LAYER, "norm_joined_taps": True, "own_embedding": True})
OPTIONS = pytest.mark.parametrize("settings", [PLAIN, ALL_OPTIONS, OWN_PARTS], ids=["plain", "all options", "own parts"])
TARGETS = pytest.mark.parametrize("name", sorted(checks.CONFIGS))


@pytest.fixture(scope="module")
def target(as_target):
    return as_target(checks.tiny_target("llama"))


@TARGETS
@OPTIONS
def test_the_training_forward_is_the_chain_written_out(name, settings):
    model = checks.tiny_target(name)
    head = checks.build(settings, model)
    _, depths = checks.depths_as_written_out(head, model, naive_chains)
    for depth, each in enumerate(depths):
        assert len(each.origins_N) == sum(max(len(prompt) - 2 - depth, 0) for prompt in checks.PROMPTS)
        assert torch.equal(each.target_places_N, each.origins_N + depth + 1)
    assert [each.weight for each in depths] == pytest.approx([1.0, 0.8, 0.64])


@torch.no_grad()
def naive_chains(head, model, taps_ATE, prompt):
    """Return what the output head reads, by depth and origin."""
    body = NaiveBody(head, model)
    read, states = [], []
    for origin in range(len(prompt) - 1):
        feature = body.feature([tap_TE[origin] for tap_TE in taps_ATE])
        number, state = body.add(body.embedded(prompt[origin + 1]), feature, origin, read)
        read.append(number)
        states.append(state)
    chains = [[] for _ in read]
    expected = []
    for depth in range(head.settings.num_depths):
        normed = [body.norm(head.norm.weight, state) for state in states]
        expected.append(normed)
        fed_back = normed if head.settings.norm_feedback else states
        states = []
        for origin in range(max(len(prompt) - 2 - depth, 0)):
            embedded = body.embedded(prompt[origin + 2 + depth])
            sees = [*read[: origin + 1], *chains[origin]]
            number, state = body.add(embedded, fed_back[origin], origin + depth + 1, sees)
            chains[origin].append(number)
            states.append(state)
    return expected


def test_it_comes_back_from_its_artifact_under_the_names_that_engines_know(tmp_path, target):
    settings = ALL_OPTIONS.model_copy(update={"num_depths": 4})
    checks.assert_comes_back(
        tmp_path / "head", checks.build(settings, target.model, checks.SOME_TOKENS), target, checks.SOME_TOKENS
    )
    layer = {
        "input_layernorm.weight": (32,),
        "self_attn.k_proj.weight": (16, 32),
        "self_attn.v_proj.weight": (16, 32),
        "self_attn.q_proj.weight": (32, 32),
        "self_attn.o_proj.weight": (32, 32),
        "post_attention_layernorm.weight": (32,),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    first = {
        name: (shape[0], 64) if name.split(".")[1] in ("k_proj", "v_proj", "q_proj") else shape for name, shape in layer.items()
    }
    wanted = {
        "fc.weight": (32, 64),
        "fc_norm.0.weight": (32,),
        "fc_norm.1.weight": (32,),
        **{f"layers.0.{name}": shape for name, shape in first.items()},
        "layers.0.hidden_norm.weight": (32,),
        **{f"layers.1.{name}": shape for name, shape in layer.items()},
        "norm.weight": (32,),
        "lm_head.weight": (32, 32),
    }
    found = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "head" / WEIGHTS_FILE).items()}
    assert found == wanted


def test_a_head_that_borrows_the_output_head_does_not_save_it(tmp_path, target):
    checks.assert_comes_back(tmp_path / "head", checks.build(PLAIN, target.model), target)
    assert not [name for name in load_file(tmp_path / "head" / WEIGHTS_FILE) if "lm_head" in name or "embed" in name]


@OPTIONS
def test_gradients_reach_every_parameter_and_none_of_the_target(settings, target):
    settings = settings.model_copy(update={"train_head": True})
    checks.assert_gradients_reach_everything(checks.build(settings, target.model, checks.SOME_TOKENS), target)


@TARGETS
def test_the_last_norm_starts_with_the_scale_of_the_targets(name):
    model = checks.tiny_target(name)
    with torch.no_grad():
        scaled = AutoModelForCausalLM.from_config(checks.CONFIGS[name], dtype=torch.float64)
        scaled.load_state_dict(model.state_dict())
        final_norm(scaled).weight.add_(torch.randn(32))
        states_ND = torch.randn(5, 32)
        states_ND -= states_ND.mean(-1, keepdim=True)  # a layer norm takes the mean off, the head's norm does not
        head = Eagle3(PLAIN, scaled, None).double()
        torch.testing.assert_close(head.norm(states_ND), final_norm(scaled)(states_ND.double()), atol=1e-4, rtol=1e-4)


def test_taps_are_those_of_the_engines_where_none_are_given(tiny_llama):
    assert default_taps(tiny_llama(layers=30)) == (2, 15, 27)
    head = Eagle3(Eagle3Settings(kind="eagle3"), tiny_llama(layers=8), None)
    assert (head.taps, head.settings.taps) == ((2, 4, 5), [2, 4, 5])
    with pytest.raises(InputError, match=r"4 blocks is too shallow .* give head.taps"):
        default_taps(checks.tiny_target("llama"))


def test_layers_may_start_from_a_block_of_the_target(target):
    head = Eagle3(PLAIN.model_copy(update={"init_block": 2, "num_layers": 2}), target.model, None)
    block = blocks(target.model)[2].state_dict()
    copied = ["self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"]
    width = target.model.config.hidden_size
    for layer, state_norm in zip(head.layers, ("hidden_norm", "input_layernorm"), strict=True):
        own = layer.state_dict()
        for name in copied:
            torch.testing.assert_close(own[f"{name}.weight"], block[f"{name}.weight"].float())
        for name in ("q_proj", "k_proj", "v_proj"):
            reads_state = own[f"self_attn.{name}.weight"][:, -width:]
            torch.testing.assert_close(reads_state, block[f"self_attn.{name}.weight"].float())
        torch.testing.assert_close(own[f"{state_norm}.weight"], block["input_layernorm.weight"].float())


@torch.no_grad()
def test_a_head_that_starts_from_the_next_block_says_what_that_block_would(target):
    settings = PLAIN.model_copy(update={"init_block": 2, "taps": [1, 2]})
    head = Eagle3(settings, target.model, None).to(target.model.dtype)
    nn.init.zeros_(head.layers[0].input_layernorm.weight)  # the embedding's half is silent
    batch, states = checks.inputs_of(target.model, checks.PROMPTS, (1, 2, 3))
    low_BTE, feature_BTE, after_BTE = states.taps_ABTE
    joined_BTF = torch.cat([torch.zeros_like(low_BTE), feature_BTE], -1)
    rotation = head.rotary(feature_BTE, batch.position_ids_BT)
    unrolled = UnrolledKeys(causal_mask(batch.document_ids_BT))
    states_BTD = head.layers[0](head.embed(batch.input_ids_BT), head.fuse(joined_BTF), rotation, unrolled)
    known_BT = batch.document_ids_BT >= 0
    torch.testing.assert_close(states_BTD[known_BT], after_BTE[known_BT], atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("name", "number", "sentence"),
    [
        ("llama", 4, "head.init_block 4: the target's blocks are 0 to 3"),
        ("gpt_neox", 0, r"block 0 of GPTNeoXForCausalLM has no self_attn\.o_proj\.weight"),
        ("gemma3", 0, "a block of Gemma3ForCausalLM norms otherwise"),
    ],
)
def test_a_block_that_layers_cannot_start_from_is_refused(name, number, sentence):
    model = checks.tiny_target(name)
    with pytest.raises(InputError, match=sentence):
        copy_block(model, number, Eagle3(PLAIN, model, None).layers[0])


def test_taps_are_noisy_in_training_alone_and_the_noise_follows_the_seed(target):
    head = checks.build(PLAIN.model_copy(update={"tap_noise": 0.1}), target.model)
    batch, states = checks.inputs_of(target.model, checks.PROMPTS, head.taps)

    def hidden(seed):
        torch.manual_seed(seed)
        return head(batch, states)[0].hidden_ND

    assert torch.equal(hidden(0), hidden(1))
    head.train()
    assert torch.equal(hidden(0), hidden(0))
    assert not torch.allclose(hidden(0), hidden(1))


def test_a_head_served_in_bfloat16_turns_far_positions_as_the_trained_one(tiny_llama):
    model = tiny_llama(layers=4, dtype=torch.bfloat16)
    head = Eagle3(PLAIN, model, None)
    positions_BT = torch.tensor([[0, 100, 30_000]])
    trained = head.rotary(torch.zeros(()), positions_BT)
    served = serve(head, model).rotary(torch.zeros(()), positions_BT)
    assert head.fc.weight.dtype == torch.bfloat16
    torch.testing.assert_close(served, trained, rtol=0, atol=0)
    assert not [module for module in head.modules() if isinstance(module, nn.Embedding)]


DEPTHS = 4
DOCUMENTS_BT = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, -1, -1]])


def made(num_key_value_heads):
    """Return an attention layer, its rotary embedding, and random states `[K, B, T, D]` to read at each depth."""
    shape = LayerShape(
        width=24,
        mlp_width=8,
        num_heads=4,
        num_key_value_heads=num_key_value_heads,
        head_width=6,
        norm_epsilon=1e-6,
        rope_theta=100.0,
        max_positions=64,
    )
    torch.manual_seed(0)
    attention = DraftAttention(shape, 24).double()
    return attention, Rotary(shape), torch.randn(DEPTHS, *DOCUMENTS_BT.shape, 24, dtype=torch.float64) * 3


def dense(attention, states, rotations, depth):
    """Return the attention output of one depth, over the keys of all depths up to it side by side, by a mask of them all."""
    T = DOCUMENTS_BT.shape[1]
    pairs = [attention.keys_values(*each) for each in zip(states[: depth + 1], rotations, strict=False)]
    keys, values = (torch.cat(each, 2) for each in zip(*pairs, strict=True))
    own_TT = torch.eye(T, dtype=torch.bool).expand(len(DOCUMENTS_BT), 1, T, T)
    visible_B1TS = torch.cat([causal_mask(DOCUMENTS_BT), *[own_TT] * depth], -1)
    return attention.attend(attention.queries(states[depth], rotations[depth]), keys, values, visible_B1TS)


@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4], ids=["one key head", "grouped", "a key head each"])
def test_every_depth_is_attention_under_a_dense_mask(num_key_value_heads):
    attention, rotary, states = made(num_key_value_heads)
    positions_BT = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
    rotations = [rotary(states, positions_BT + depth) for depth in range(DEPTHS)]
    unrolled = UnrolledKeys(causal_mask(DOCUMENTS_BT))
    for depth in range(DEPTHS):
        found_BTD = unrolled.attend(attention, states[depth], rotations[depth])
        expected_BTD = dense(attention, states, rotations, depth)
        torch.testing.assert_close(found_BTD, expected_BTD, atol=1e-5, rtol=1e-5)  # weights are computed in float32


def test_gradients_flow_through_all_depths_as_under_a_dense_mask():
    attention, rotary, states = made(2)
    rotations = [rotary(states, torch.arange(7).expand(2, -1) + depth) for depth in range(DEPTHS)]
    gradients = []
    for way in ("unrolled", "dense"):
        leaf = states.clone().requires_grad_()
        unrolled = UnrolledKeys(causal_mask(DOCUMENTS_BT))
        outputs = [
            unrolled.attend(attention, leaf[depth], rotations[depth])
            if way == "unrolled"
            else dense(attention, list(leaf), rotations, depth)
            for depth in range(DEPTHS)
        ]
        gradients.append(torch.autograd.grad(torch.stack(outputs).square().sum(), leaf)[0])
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)
    assert bool(gradients[0].abs().amax(-1).gt(0).all())


def test_a_chain_sees_nothing_of_other_chains_nor_of_later_origins():
    attention, rotary, states = made(2)
    rotations = [rotary(states, torch.arange(7).expand(2, -1) + depth) for depth in range(DEPTHS)]

    def last_depth(states):
        unrolled = UnrolledKeys(causal_mask(DOCUMENTS_BT))
        return [unrolled.attend(attention, states[depth], rotations[depth]) for depth in range(DEPTHS)][-1]

    plain_BTD, changed = last_depth(states), states.clone()
    changed[1:, 0, 4] += 1  # the deeper states of one origin
    changed[0, 0, 5] += 1  # and a depth-0 state after it, in the same document
    differs_BT = (last_depth(changed) - plain_BTD).abs().amax(-1) > 1e-9
    assert differs_BT.tolist() == [[False, False, False, False, True, True, True], [False] * 7]

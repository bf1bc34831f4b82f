"""EAGLE-3's training forward is the unrolled chain, its attention that under a dense mask; what it starts from."""

import pytest
import torch
from torch import nn

from configs.runtime.errors import InputError
from configs.schema.heads import Eagle3Settings
from heads.families.eagle3 import Eagle3, copy_block, default_taps
from heads.families.registry import serve
from heads.modules.attention import RowKeys, causal_ranges
from heads.modules.interface import labelled_origins
from tests.support import family_checks as checks
from tests.support.naive_layers import NaiveBody

EAGLE = checks.SETTINGS["eagle3"]
TARGETS = sorted(checks.CONFIGS)


@pytest.fixture(scope="module")
def model():
    return checks.tiny_target("llama")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, "eagle3") for name in TARGETS),
        ("gemma3", "eagle3, all options"),
        ("qwen3", "eagle3, own parts"),
        ("llama", "eagle3, window"),
    ],
)
def test_the_training_forward_is_the_chain_written_out(name, options):
    model = checks.tiny_target(name)
    _, depths = checks.depths_as_written_out(checks.build(checks.SETTINGS[options], model), model, naive_chains)
    for depth, each in enumerate(depths):
        assert len(each.origins_N) == sum(max(len(prompt) - 2 - depth, 0) for prompt in checks.PROMPTS)
        assert torch.equal(each.target_places_N, each.origins_N + depth + 1)
    assert [each.weight for each in depths] == pytest.approx([1.0, 0.8, 0.64])


@torch.no_grad()
def naive_chains(head, model, taps_ATE, prompt):
    """Return what the output head reads, by depth and origin."""
    body = NaiveBody(head, model, norm_heads=head.settings.qk_norm)
    read, states = [], []
    window = head.settings.window or len(prompt) + head.settings.num_depths

    def seen(position, origin):
        return read[max(0, position - window + 1) : origin + 1]

    for origin in range(len(prompt) - 1):
        feature = body.feature([tap_TE[origin] for tap_TE in taps_ATE])
        number, state = body.add(body.embedded(prompt[origin + 1]), feature, origin, seen(origin, origin))
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
            position = origin + depth + 1
            sees = [*seen(position, origin), *chains[origin]]
            number, state = body.add(embedded, fed_back[origin], position, sees)
            chains[origin].append(number)
            states.append(state)
    return expected


@pytest.mark.parametrize("name", ["eagle3", "eagle3, own parts"])
@torch.no_grad()
def test_states_are_made_where_a_label_follows_alone_and_are_the_same_there(name, model):
    head = checks.build(checks.SETTINGS[name], model)
    batch, states = checks.inputs_of(model, checks.PROMPTS, head.taps)
    mask_BT = batch.loss_mask_BT.clone()
    mask_BT[:, :4] = mask_BT[:, 6:8] = mask_BT[1] = False  # a turn between two answers, and a row without any
    widths = []
    head.layers[-1].mlp.register_forward_hook(lambda module, args, output: widths.append(output.shape[1]))
    for depth, (some, whole) in enumerate(
        zip(head(batch._replace(loss_mask_BT=mask_BT), states), head(batch, states), strict=True)
    ):
        assert torch.equal(some.origins_N, labelled_origins(batch._replace(loss_mask_BT=mask_BT), depth))
        kept_N = torch.isin(whole.origins_N, some.origins_N)
        torch.testing.assert_close(some.hidden_ND, whole.hidden_ND[kept_N], atol=1e-6, rtol=1e-6)
    assert all(width < mask_BT.shape[1] - 2 for width in widths[: head.settings.num_depths])


def test_taps_are_those_of_the_engines_where_none_are_given(tiny_llama, model):
    assert default_taps(tiny_llama(layers=30)) == (2, 15, 27)
    head = Eagle3(Eagle3Settings(kind="eagle3"), tiny_llama(layers=8), None)
    assert (head.taps, head.settings.taps) == ((2, 4, 5), [2, 4, 5])
    with pytest.raises(InputError, match=r"4 blocks is too shallow .* give head.taps"):
        default_taps(model)


@pytest.mark.parametrize(("name", "qk_norm", "tolerance"), [("llama", None, 0.02), ("qwen3", True, 0.05)])
@torch.no_grad()
def test_a_head_that_starts_from_the_next_block_gives_what_that_block_would(name, qk_norm, tolerance):
    model = checks.tiny_target(name)
    torch.manual_seed(0)
    settings = EAGLE.model_copy(update={"init_block": 2, "taps": [1, 2], "qk_norm": qk_norm, "norm_taps": False})
    head = Eagle3(settings, model, None).to(model.dtype)
    nn.init.zeros_(head.layers[0].input_layernorm.weight)  # the embedding's half is silent
    batch, states = checks.inputs_of(model, checks.PROMPTS, (1, 2, 3))
    low_BTE, feature_BTE, after_BTE = states.taps_ABTE
    joined_BTF = torch.cat([torch.zeros_like(low_BTE), feature_BTE], -1)
    rotation = head.rotary(feature_BTE, batch.position_ids_BT)
    unrolled = RowKeys(causal_ranges(batch.position_ids_BT))
    states_BTD = head.layers[0](head.embed(batch.input_ids_BT), head.fuse(joined_BTF), rotation, unrolled)
    known_BT = batch.document_ids_BT >= 0
    torch.testing.assert_close(states_BTD[known_BT], after_BTE[known_BT], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("name", "number", "sentence"),
    [
        ("llama", 4, "head.init_block 4: the target's blocks are 0 to 3"),
        ("gpt_neox", 0, r"block 0 of GPTNeoXForCausalLM has no self_attn\.o_proj\.weight"),
        ("gemma3", 0, "block 0 of Gemma3ForCausalLM norms otherwise"),
    ],
)
def test_a_block_that_layers_cannot_start_from_is_refused(name, number, sentence):
    model = checks.tiny_target(name)
    with pytest.raises(InputError, match=sentence):
        copy_block(model, number, Eagle3(EAGLE, model, None).layers[0])


def test_a_head_served_in_bfloat16_turns_far_positions_as_the_trained_one(tiny_llama):
    model = tiny_llama(layers=4, dtype=torch.bfloat16)
    head = Eagle3(EAGLE, model, None)
    positions_BT = torch.tensor([[0, 100, 30_000]])
    trained = head.rotary(torch.zeros(()), positions_BT)
    torch.testing.assert_close(serve(head, model).rotary(torch.zeros(()), positions_BT), trained, rtol=0, atol=0)
    assert head.fc.weight.dtype == torch.bfloat16

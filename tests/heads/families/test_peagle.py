"""P-EAGLE's training forward is every element written out with what it sees."""

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.training import LossConfig
from distill.loss.objectives import HeadObjective
from heads.families.eagle3 import mask_token
from heads.modules.interface import labelled_origins
from tests.support import family_checks as checks
from tests.support.naive_layers import NaiveBody

PEAGLE = checks.SETTINGS["peagle"]


@pytest.fixture(scope="module")
def target(as_target):
    return as_target(checks.tiny_target("llama"))


@pytest.mark.parametrize(
    ("name", "options"), [*((name, "peagle") for name in sorted(checks.CONFIGS)), ("gemma3", "peagle, all options")]
)
def test_the_training_forward_is_every_element_written_out(name, options):
    model, settings = checks.tiny_target(name), checks.SETTINGS[options]
    head = checks.build(settings, model)
    batch, depths = checks.depths_as_written_out(head, model, naive_elements)
    for depth, each in enumerate(depths):
        assert torch.equal(each.origins_N, labelled_origins(batch, depth))
        assert torch.equal(each.target_places_N, each.origins_N + depth + 1)
        assert each.row_weights_N.tolist() == [1.0] * len(each.origins_N)
    assert [each.weight for each in depths] == pytest.approx([0.8**depth for depth in range(settings.num_depths)])


@torch.no_grad()
def naive_elements(head, model, taps_ATE, prompt):
    """Return what the output head reads, by depth and origin."""
    body = NaiveBody(head, model)
    mask_feature = body.feature(head.mask_hidden.flatten().split(32))
    read, expected = [], [[] for _ in range(head.settings.num_depths)]
    for origin in range(len(prompt) - 1):
        feature = body.feature([tap_TE[origin] for tap_TE in taps_ATE])
        number, state = body.add(body.embedded(prompt[origin + 1]), feature, origin, read)
        read.append(number)
        expected[0].append(body.norm(head.norm.weight, state))
    for origin in read:
        chain = []
        for depth in range(1, head.settings.num_depths):
            element = (body.embedded(head.settings.mask_token_id), mask_feature, origin + depth)
            number, state = body.add(*element, [*read[: origin + 1], *chain])
            chain.append(number)
            expected[depth].append(body.norm(head.norm.weight, state))
    return expected


def test_a_forward_that_keeps_some_origins_gives_them_the_states_of_one_that_keeps_all(target):
    head = checks.build(checks.SETTINGS["peagle, all options"].model_copy(update={"keep_share": 0.6}), target.model)
    batch, states = checks.inputs_of(target.model, [*checks.PROMPTS, list(range(5, 30))], head.taps)
    whole = head(batch, states)
    torch.manual_seed(0)
    sampled = head.train()(batch, states)
    for depth, (some, all_) in enumerate(zip(sampled, whole, strict=True)):
        places = [all_.origins_N.tolist().index(origin) for origin in some.origins_N.tolist()]
        torch.testing.assert_close(some.hidden_ND, all_.hidden_ND[places], atol=1e-5, rtol=1e-5)
        assert (len(places) < len(all_.origins_N)) == (depth > 0)


def test_the_sampled_loss_is_the_whole_one_on_average(target):
    head = checks.build(PEAGLE.model_copy(update={"keep_share": 0.5, "min_keep_share": 0.1}), target.model)
    batch, states = checks.inputs_of(target.model, [list(range(3, 20)), list(range(30, 41))], head.taps)
    objective = HeadObjective(head, target, LossConfig())
    with torch.no_grad():
        whole = objective(batch, states).loss
        head.train()
        torch.manual_seed(0)
        sampled = torch.stack([objective(batch, states).loss for _ in range(60)])
    error = sampled.std() / len(sampled) ** 0.5
    assert 0 < error < 0.02 * whole
    assert abs(sampled.mean() - whole) < 3 * error


@pytest.mark.parametrize("rows", [[[5, 6]], [[5, 6, 7]], [[5, 6, 7], list(range(4, 12))]], ids=["none", "one", "ragged"])
def test_texts_shorter_than_the_depths_can_be_trained_on(target, rows):
    head = checks.build(PEAGLE, target.model).train()
    batch, states = checks.inputs_of(target.model, rows, head.taps)
    loss = HeadObjective(head, target, LossConfig())(batch, states)
    loss.loss.backward()
    assert loss.labels_K[0] == sum(len(row) - 2 for row in rows)
    assert head.mask_hidden.grad is not None  # of 0 perhaps: processes that train together expect one from each


def test_the_mask_token_is_the_padding_or_the_first_end_of_text(tiny_llama):
    model = tiny_llama()
    assert mask_token(63, model) == 63
    with pytest.raises(InputError, match=r"head\.mask_token_id: the target's tokens are 0 to 63, got 64"):
        mask_token(64, model)
    with pytest.raises(InputError, match="names neither a padding nor an end-of-text token"):
        mask_token(None, model)
    model.config.eos_token_id = [9, 4]
    assert mask_token(None, model) == 9
    model.config.pad_token_id = 5
    assert mask_token(None, model) == 5
    model.config.pad_token_id = -1  # some configs say so for none
    assert mask_token(None, model) == 9

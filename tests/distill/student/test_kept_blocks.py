"""Kept blocks compute what they did in the target, in every family, before and after they are saved; or are refused."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.runtime.errors import InputError
from distill.student.init import keep_layers
from heads.frozen.hidden_states import blocks, final_norm
from heads.inference.causal_lm import head_logits
from tests.support.family_configs import HYBRIDS, STATELESS, tiny_model

BY_NUMBER = {"diffllama", "minicpm3"}
BY_PERIOD = {"ernie4_5_moe", "jamba"}  # their configs give blocks their kinds by number
IDS_BT = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def run_by_hand(model, layers):
    """Return the logits after these blocks alone, each called with what it is given beside the states in a whole forward."""
    calls = []
    hooks = [
        block.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        for block in blocks(model)
    ]
    model(input_ids=IDS_BT, use_cache=False)
    for hook in hooks:
        hook.remove()
    states_BTE = calls[0][0][0] if calls[0][0] else calls[0][1]["hidden_states"]
    for layer in layers:
        args, kwargs = calls[layer]
        given = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        output = blocks(model)[layer](states_BTE, *args[1:], **given)
        states_BTE = output[0] if isinstance(output, tuple) else output
    return head_logits(model, final_norm(model)(states_BTE))


@pytest.mark.parametrize("name", [name for name in (*STATELESS, *HYBRIDS) if name not in BY_NUMBER | BY_PERIOD])
@pytest.mark.parametrize("layers", [[1, 3], [0, 2, 3]], ids=str)
@torch.no_grad()
def test_kept_blocks_compute_what_they_did_in_the_target(name, layers):
    model = tiny_model(name)
    before = [parameter.clone() for parameter in model.parameters()]
    draft = keep_layers(model, layers)
    expected_BTV = run_by_hand(model, layers)
    torch.testing.assert_close(draft(input_ids=IDS_BT, use_cache=False).logits, expected_BTV)
    for parameter in draft.parameters():
        parameter.zero_()
    assert all(map(torch.equal, before, model.parameters()))  # nothing is shared with the target


@pytest.mark.parametrize("name", sorted({*HYBRIDS} - BY_PERIOD))
@torch.no_grad()
def test_blocks_of_several_kinds_are_loaded_as_they_were_kept(name, tmp_path):
    model = tiny_model(name)
    draft = keep_layers(model, [0, 2, 3])
    draft.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
    logits_BTV, expected_BTV = (each(input_ids=IDS_BT, use_cache=False).logits for each in (loaded, draft))
    torch.testing.assert_close(logits_BTV, expected_BTV)


@pytest.mark.parametrize("name", sorted(BY_NUMBER))
def test_blocks_that_depend_on_their_number_are_refused(name):
    with pytest.raises(InputError, match=r"blocks 1, 3 of .* compute something else as a model of their own"):
        keep_layers(tiny_model(name), [1, 3])


def test_weights_with_a_part_for_each_block_are_refused():
    model = copy.deepcopy(tiny_model("llama"))
    model.model.norm.weight = torch.nn.Parameter(torch.ones(80))
    with pytest.raises(InputError, match=r"cannot stand alone: .*size mismatch for model.norm.weight"):
        keep_layers(model, [1, 3])


def test_blocks_whose_kind_cannot_be_said_are_refused():
    for name in BY_PERIOD:
        with pytest.raises(InputError, match=r"cannot stand alone"):
            keep_layers(tiny_model(name), [1, 3])
    with pytest.raises(
        InputError, match=r"cannot be kept, since .* expects at least one 'linear_attention' layer.*keep others"
    ):
        keep_layers(tiny_model("olmo_hybrid"), [0, 3])

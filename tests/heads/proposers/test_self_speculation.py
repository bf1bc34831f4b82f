"""The target's first blocks as a causal LM: no copies, no change of output, and refused where they are no model."""

import pytest
import torch

from configs.runtime.errors import InputError
from heads.frozen.hidden_states import blocks, final_norm, read_states
from heads.proposers.self_speculation import SharedBlocks, early_exit
from tests.support.family_checks import CONFIGS, tiny_target
from tests.support.family_configs import tiny_model


@pytest.mark.parametrize("name", CONFIGS)
def test_the_draft_is_the_targets_own_modules(name):
    model = tiny_target(name)
    draft = early_exit(model, 2)
    assert {id(parameter) for parameter in draft.parameters()} < {id(parameter) for parameter in model.parameters()}
    assert list(blocks(draft)) == list(blocks(model))[:2]
    assert model.config.get_text_config().num_hidden_layers == len(blocks(model)) == 4


@pytest.mark.parametrize("name", ["smollm3", "gpt2", "opt", "falcon", "mpt", "deepseek_v3", "mellum", "gemma4_text"])
def test_the_blocks_of_any_family_are_found(name):
    model = tiny_model(name)
    ids_BT = torch.arange(3, 27).unsqueeze(0)  # longer than the windows
    states = read_states(model, ids_BT, [2])
    with torch.no_grad():
        exit_BTE = final_norm(model)(states.joined_BTF)
    torch.testing.assert_close(read_states(early_exit(model, 2), ids_BT, []).final_BTE, exit_BTE)


@pytest.mark.parametrize("num_layers", [0, 4, 9])
def test_a_number_of_blocks_that_leaves_none_to_draft_or_none_to_verify_is_refused(num_layers):
    with pytest.raises(InputError, match=f"needs 1 to 3 of the target's 4 blocks, got {num_layers}"):
        early_exit(tiny_target("llama"), num_layers)


def test_blocks_that_are_not_the_model_in_two_parts_do_not_share_work(tiny_llama):
    with pytest.raises(InputError, match="GPT2LMHeadModel cannot draft for itself: its blocks do not run in two parts"):
        SharedBlocks(tiny_model("gpt2"), 2)  # which adds more than its embedding before the blocks
    model = tiny_llama(seed=1, layers=4)
    SharedBlocks(model, 2)
    model.model.register_forward_hook(
        lambda _, args, output: setattr(output, "last_hidden_state", 2 * output.last_hidden_state)
    )
    with pytest.raises(InputError, match="cannot draft for itself"):
        SharedBlocks(model, 2)

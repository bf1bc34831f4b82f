"""The target's first blocks draft: no copies, no change of output, and no row of theirs computed twice where work is shared."""

import gc

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import ConfidenceStopping
from eval.decoder.decode import decode, generate
from heads.frozen.hidden_states import blocks, final_norm, read_states
from heads.inference.causal_lm import new_cache
from heads.proposers.draft_lm import DraftLM
from heads.proposers.self_speculation import SelfSpeculation, early_exit
from tests.support.decoding import requests_for
from tests.support.family_checks import CONFIGS, PROMPTS, tiny_target
from tests.support.family_configs import tiny_model


def shared(model, num_layers):
    return SelfSpeculation(model, num_layers, 64)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_draft_is_the_targets_own_modules(name):
    model = tiny_target(name)
    draft = early_exit(model, 2)
    assert {id(parameter) for parameter in draft.parameters()} < {id(parameter) for parameter in model.parameters()}
    assert list(blocks(draft)) == list(blocks(model))[:2]
    assert model.config.get_text_config().num_hidden_layers == len(blocks(model)) == 4
    ids_BT = torch.tensor(PROMPTS[1:2])
    with torch.no_grad():
        early_BTE = read_states(draft, ids_BT, [2]).joined_BTF
        torch.testing.assert_close(early_BTE, read_states(model, ids_BT, [2]).joined_BTF)


@pytest.mark.parametrize("name", ["smollm3", "gpt2", "opt", "falcon", "mpt", "deepseek_v3", "mellum", "gemma4_text"])
def test_the_blocks_of_any_family_are_found(name):
    model = tiny_model(name)
    ids_BT = torch.arange(3, 27).unsqueeze(0)  # longer than the windows
    states = read_states(model, ids_BT, [2])
    with torch.no_grad():
        exit_BTE = final_norm(model)(states.joined_BTF)
    torch.testing.assert_close(read_states(early_exit(model, 2), ids_BT, []).final_BTE, exit_BTE)


def test_a_model_that_adds_more_than_its_embedding_before_the_blocks_does_not_share_work():
    with pytest.raises(InputError, match="GPT2LMHeadModel cannot draft for itself: its blocks do not run in two parts"):
        shared(tiny_model("gpt2"), 2)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_output_is_plain_greedy_output(name, batch_size, as_target):
    target = as_target(tiny_target(name))
    plain = generate(target, PROMPTS, DecodeConfig(num_speculative_tokens=0, max_new_tokens=16))
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=16, batch_size=batch_size)
    assert generate(target, PROMPTS, config, DraftLM(early_exit(target.model, 2), 64)) == plain
    assert generate(target, PROMPTS, config, shared(target.model, 2)) == plain


def test_the_targets_cache_is_let_go_with_the_batch_that_it_was_for(as_target):
    target = as_target(tiny_target("llama"))
    draft = shared(target.model, 2)
    generate(target, PROMPTS, DecodeConfig(num_speculative_tokens=3, max_new_tokens=8, batch_size=3), draft)
    gc.collect()
    assert draft._cache() is None


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("stopping", [None, ConfidenceStopping(rule="confidence", threshold=0.3)], ids=["fixed", "stopping"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_shared_work_gives_the_rounds_of_a_draft_with_a_cache_of_its_own(num_layers, stopping, temperature, as_target):
    target = as_target(tiny_target("llama"))
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=20, temperature=temperature, stopping=stopping)
    apart, _ = decode(target, requests_for(PROMPTS), config, DraftLM(early_exit(target.model, num_layers), 64))
    together, _ = decode(target, requests_for(PROMPTS), config, shared(target.model, num_layers))
    assert [generation.rounds for generation in together] == [generation.rounds for generation in apart]
    rounds = [round_ for generation in together for round_ in generation.rounds]
    assert len({round_.num_accepted for round_ in rounds}) > 1


def rows_through_first_block(target, config, proposer):
    """How many tokens the first block reads while one request is decoded, and the generation."""
    seen = []
    handle = blocks(target.model)[0].register_forward_hook(lambda _, args, output: seen.append(args[0].shape[1]))
    (generation,), _ = decode(target, requests_for(PROMPTS[:1]), config, proposer)
    handle.remove()
    return sum(seen), generation


def test_no_token_goes_twice_through_the_blocks_that_draft_in_one_round(as_target):
    target = as_target(tiny_target("llama"))
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=20)
    apart, _ = rows_through_first_block(target, config, DraftLM(early_exit(target.model, 2), 64))
    together, generation = rows_through_first_block(target, config, shared(target.model, 2))
    assert together == len(PROMPTS[0]) + sum(1 + len(round_.drafted) for round_ in generation.rounds)
    # With a cache of its own the draft reads the prompt too, and a token for each draft.
    drafted = sum(len(round_.drafted) for round_ in generation.rounds)
    assert apart >= together + len(PROMPTS[0]) + drafted


def test_a_batch_that_broke_off_in_the_middle_of_a_round_leaves_nothing_behind(as_target, monkeypatch):
    target = as_target(tiny_target("llama"))
    proposer = shared(target.model, 2)
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=20)
    expected = generate(target, PROMPTS, config, proposer)
    with monkeypatch.context() as patched:
        patched.setattr(proposer, "late", None)  # the draft's blocks run, the others fail
        with pytest.raises(TypeError):
            generate(target, PROMPTS, config, proposer)
        patched.setattr(SelfSpeculation, "forward_states", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(target, PROMPTS, config, proposer)
    assert generate(target, PROMPTS, config, proposer) == expected


@pytest.mark.parametrize("num_layers", [0, 4, 9])
def test_a_number_of_blocks_that_leaves_none_to_draft_or_none_to_verify_is_refused(num_layers):
    with pytest.raises(InputError, match=f"needs 1 to 3 of the target's 4 blocks, got {num_layers}"):
        early_exit(tiny_target("llama"), num_layers)


def test_states_of_others_are_not_watched():
    proposer = SelfSpeculation(tiny_target("llama"), 2, 64)
    with pytest.raises(ValueError, match="reads chains and no taps"):
        proposer.forward_states(new_cache(tiny_target("llama"), 8), torch.tensor([[1, 2]]), [0], (1,))


def test_a_model_that_is_more_than_its_blocks_in_a_row_is_refused(tiny_llama):
    model = tiny_llama(seed=1, layers=4)
    SelfSpeculation(model, 2, 64)
    model.model.register_forward_hook(
        lambda _, args, output: setattr(output, "last_hidden_state", 2 * output.last_hidden_state)
    )
    with pytest.raises(InputError, match="cannot draft for itself"):
        SelfSpeculation(model, 2, 64)

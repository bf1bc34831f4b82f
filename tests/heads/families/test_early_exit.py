"""An early exit drafts with the target's first blocks: untrained as self-speculation, on the target's cache, and losslessly."""

import gc

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.heads import EarlyExitSettings
from eval.decoder.decode import decode
from heads.families.early_exit import part_of
from heads.families.registry import FAMILIES, serve
from heads.frozen.hidden_states import blocks, final_norm, read_states
from heads.inference.runner import runner_of
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import LookupFirst, MergedDrafts, PromptLookup
from tests.support import family_checks as checks
from tests.support.decoding import requests_for
from tests.support.family_configs import tiny_model
from tests.support.naive_layers import NaiveBody

SETTINGS = checks.SETTINGS["early_exit"]
FAMILY = FAMILIES["early_exit"]


def proposer_of(model, stir=0.2):
    return FAMILY.propose(serve(checks.build(SETTINGS, model, stir=stir), model), model.device)


def rounds_of(target, config, proposer):
    return [generation.rounds for generation in decode(target, requests_for(checks.PROMPTS), config, proposer)[0]]


@pytest.mark.parametrize("name", checks.CONFIGS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_untrained_it_drafts_as_self_speculation_does(name, temperature, as_target):
    target = as_target(checks.tiny_target(name))
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=16, temperature=temperature, verification="block")
    expected = rounds_of(target, config, DraftLM(part_of(target.model, 0, 2), 64))
    assert rounds_of(target, config, proposer_of(target.model, stir=0.0)) == expected
    assert len({each.num_accepted for rounds in expected for each in rounds}) > 1


def test_no_token_goes_twice_through_the_blocks_that_draft_in_one_round(as_target):
    target, seen = as_target(checks.tiny_target("llama")), []
    handle = blocks(target.model)[0].register_forward_hook(lambda _, args, output: seen.append(args[0].shape[1]))
    proposer = proposer_of(target.model)
    seen.clear()  # of the probe
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=16)
    (generation,), _ = decode(target, requests_for(checks.PROMPTS[:1]), config, proposer)
    handle.remove()
    assert sum(seen) == len(checks.PROMPTS[0]) + sum(1 + len(each.drafted) for each in generation.rounds)


def test_a_batch_that_broke_off_in_the_middle_of_a_round_leaves_nothing_behind(as_target, monkeypatch):
    target = as_target(checks.tiny_target("llama"))
    proposer = proposer_of(target.model)
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=16)
    expected = rounds_of(target, config, proposer)
    with monkeypatch.context() as patched:
        patched.setattr(proposer._blocks, "late", None)  # the draft's blocks run, the others fail
        with pytest.raises(TypeError):
            rounds_of(target, config, proposer)
    assert rounds_of(target, config, proposer) == expected
    gc.collect()
    assert proposer._blocks._cache() is None  # which goes with the batch that it was for


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_after_a_lookup_it_loses_nothing(name, as_target):
    target = as_target(checks.tiny_target(name))
    proposer = proposer_of(target.model)
    plain = DecodeConfig(num_speculative_tokens=0, max_new_tokens=16, batch_size=3)
    prompts = requests_for([[*prompt, 9, *prompt] for prompt in checks.PROMPTS])
    expected = [generation.tokens for generation in decode(target, prompts, plain)[0]]
    config = plain.model_copy(update={"num_speculative_tokens": 3})
    for draft in (proposer, LookupFirst(PromptLookup(target.device), proposer, 64), proposer):
        assert [generation.tokens for generation in decode(target, prompts, config, draft)[0]] == expected
    with pytest.raises(InputError, match="early exit"):
        MergedDrafts([proposer, PromptLookup(target.device)], target.device)


def test_the_forward_is_an_attention_layer_after_the_blocks_and_every_depth_the_same_function():
    model = checks.tiny_target("llama")
    head = checks.build(SETTINGS, model)

    def written_out(head, model, taps, prompt):
        body, attention, seen, found = NaiveBody(head, model, []), head.layer.self_attn, [], []
        for position, exit_E in enumerate(taps[0][: len(prompt)]):
            read_E = body.norm(head.layer.input_layernorm.weight, exit_E)
            seen.append(body.keys_values(attention, read_E, position))
            state_E = body.attended(attention, exit_E, read_E, position, seen)
            found.append(body.norm(head.norm.weight, state_E))
        return [found[1 + depth :] for depth in range(SETTINGS.num_depths)]

    batch, depths = checks.depths_as_written_out(head, model, written_out)
    assert len(depths) == 3
    (trained,) = head.train()(batch, checks.inputs_of(model, checks.PROMPTS, head.taps)[1])
    labels = [set((depth.origins_N + 2 + number).tolist()) for number, depth in enumerate(depths)]
    assert set((trained.origins_N + 2).tolist()) == labels[0] > labels[1] > labels[2]


@pytest.mark.parametrize("name", ["smollm3", "gpt2", "opt", "falcon", "mpt", "deepseek_v3", "mellum", "gemma4_text"])
def test_the_first_blocks_of_any_family_are_a_model_of_the_targets_own_modules(name):
    model = tiny_model(name)
    draft = part_of(model, 0, 2)
    assert list(blocks(draft)) == list(blocks(model))[:2]
    assert {id(parameter) for parameter in draft.parameters()} < {id(parameter) for parameter in model.parameters()}
    ids_BT = torch.arange(3, 27).unsqueeze(0)  # longer than the windows
    with torch.no_grad():
        exit_BTE = final_norm(model)(read_states(model, ids_BT, [2]).joined_BTF)
    torch.testing.assert_close(read_states(draft, ids_BT, []).final_BTE, exit_BTE)


# --- refusals -----------------------------------------------------------------------------------------------------


def test_an_exit_that_leaves_no_block_to_verify_is_refused():
    with pytest.raises(InputError, match=r"head.taps"):
        FAMILY.build(EarlyExitSettings(kind="early_exit", taps=[4]), checks.tiny_target("llama"), None)
    assert FAMILY.build(EarlyExitSettings(kind="early_exit"), checks.tiny_target("llama"), None).taps == [1]


@pytest.mark.parametrize(("name", "tap"), [("gemma4_text", 1), ("gemma4_text", 3), ("qwen2_5_vl", 1), ("gpt2", 2)])
def test_a_target_whose_blocks_do_not_run_in_two_parts_is_refused_before_anything_is_trained(name, tap):
    target = tiny_model(name)
    head = FAMILY.build(EarlyExitSettings(kind="early_exit", taps=[tap]), target, None)
    with pytest.raises(InputError, match="cannot draft for itself"):
        FAMILY.start(head, target)


def test_blocks_that_are_not_the_model_in_two_parts_or_run_elsewhere_are_refused(tiny_llama):
    model = tiny_llama(seed=1, layers=4)
    head = FAMILY.build(SETTINGS, model, None)
    FAMILY.start(head, model)
    model.model.register_forward_hook(
        lambda _, args, output: setattr(output, "last_hidden_state", 2 * output.last_hidden_state)
    )
    with pytest.raises(InputError, match="cannot draft for itself"):
        FAMILY.start(head, model)
    runner_of(model).runs_elsewhere = True
    with pytest.raises(InputError, match=r"head.kind"):
        FAMILY.start(head, model)

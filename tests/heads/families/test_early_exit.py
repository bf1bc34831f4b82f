"""An early exit drafts with the target's first blocks: untrained as self-speculation, on the target's cache, and losslessly."""

import gc

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.heads import EarlyExitSettings
from eval.decoder.decode import decode
from heads.families.early_exit import SharedBlocks, early_exit
from heads.families.registry import FAMILIES, serve
from heads.frozen.hidden_states import blocks, final_norm, read_states
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import PromptLookup
from heads.proposers.merged import LookupFirst
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
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=16, temperature=temperature)
    expected = rounds_of(target, config, DraftLM(early_exit(target.model, 2), 64))
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
        patched.setattr(proposer._shared, "late", None)  # the draft's blocks run, the others fail
        with pytest.raises(TypeError):
            rounds_of(target, config, proposer)
    assert rounds_of(target, config, proposer) == expected
    gc.collect()
    assert not proposer._shared.has_cache  # which goes with the batch that it was for


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])  # the blocks of GPT-2 do not run in two parts
def test_after_a_lookup_it_has_a_cache_of_its_own_and_loses_nothing(name, as_target):
    target = as_target(checks.tiny_target(name) if name in checks.CONFIGS else tiny_model(name))
    proposer = proposer_of(target.model)
    plain = DecodeConfig(num_speculative_tokens=0, max_new_tokens=16)
    prompts = requests_for([[*prompt, 9, *prompt] for prompt in checks.PROMPTS])
    expected = [generation.tokens for generation in decode(target, prompts, plain)[0]]
    config = plain.model_copy(update={"num_speculative_tokens": 3})
    for draft in (proposer, LookupFirst(PromptLookup(target.device), proposer, 64), proposer):
        decode(target, prompts, config.model_copy(update={"max_new_tokens": 1}), proposer)  # which ends before a round
        assert [generation.tokens for generation in decode(target, prompts, config, draft)[0]] == expected


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


@pytest.mark.parametrize("taps", [[4], [9]])
def test_an_exit_that_leaves_no_block_to_verify_is_refused(taps):
    settings = EarlyExitSettings(kind="early_exit", taps=taps)
    with pytest.raises(InputError, match=f"head.taps: .* one of 1 to 3, got {taps[0]} of its 4 blocks"):
        FAMILY.build(settings, checks.tiny_target("llama"), None)
    assert FAMILY.build(EarlyExitSettings(kind="early_exit"), checks.tiny_target("llama"), None).taps == [1]


@pytest.mark.parametrize(
    ("name", "tap", "says"),
    [
        (
            "gemma4_text",
            1,
            "the first 1 blocks of Gemma4ForCausalLM do not run without the others .* take another one of head.taps",
        ),
        ("gemma4_text", 3, "Gemma4ForCausalLM cannot draft for itself: its blocks 0 to 2, .* are no model by themselves"),
        ("qwen2_5_vl", 1, "transformers has no causal LM with the blocks that it has"),
    ],
)
def test_first_blocks_that_do_not_run_alone_are_refused_before_anything_is_trained(name, tap, says):
    target = tiny_model(name)
    head = FAMILY.build(EarlyExitSettings(kind="early_exit", taps=[tap]), target, None)
    with pytest.raises(InputError, match=says):
        FAMILY.start(head, target)


# --- the target in two parts ---


@pytest.mark.parametrize("name", checks.CONFIGS)
def test_the_draft_is_the_targets_own_modules(name):
    model = checks.tiny_target(name)
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
        early_exit(checks.tiny_target("llama"), num_layers)


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

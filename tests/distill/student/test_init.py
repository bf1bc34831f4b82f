"""The draft before training: kept blocks compute what they did in the target; adapters change nothing until trained."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from configs.runtime.errors import ConfigError, InputError
from configs.schema.training import LoraSettings, StudentConfig
from distill.student.init import add_adapters, initial_draft, keep_layers, merge_adapters
from heads.frozen.hidden_states import blocks, final_norm
from heads.inference.causal_lm import head_logits
from tests.support.family_configs import HYBRIDS, STATELESS, tiny_model

IDS = torch.tensor([[7, 12, 3, 40]])


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1, layers=3, dtype=torch.float32))


def test_a_block_that_the_target_does_not_have_is_refused(target):
    with pytest.raises(InputError, match="3 was asked for, but LlamaForCausalLM has blocks 0 to 2"):
        initial_draft(StudentConfig(layers=[0, 3]), target)


def test_a_smaller_model_with_another_tokenizer_or_without_rows_for_every_token_is_refused(
    target, tmp_path, tiny_llama, tiny_tokenizer
):
    config = StudentConfig(init="model", path=str(tmp_path))
    tiny_llama(seed=3, dtype=torch.float32).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert initial_draft(config, target).config.num_hidden_layers == 2
    tiny_llama(vocab_size=60).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="vocabulary of 60"):
        initial_draft(config, target)
    other = tiny_tokenizer.__class__.from_pretrained(tmp_path)
    other.add_tokens(["another_word"])
    other.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="another tokenizer"):
        initial_draft(config, target)


@pytest.mark.parametrize(("rows", "of_target"), [(64, 72), (80, 64)])
def test_a_smaller_model_gets_as_many_tokens_as_the_target_and_those_it_gains_never_win(
    rows, of_target, tmp_path, tiny_llama, tiny_tokenizer, as_target
):
    model = tiny_llama(seed=3, vocab_size=rows, dtype=torch.float32)
    for each in (model, tiny_tokenizer):
        each.save_pretrained(tmp_path)
    target = as_target(tiny_llama(seed=1, vocab_size=of_target, dtype=torch.float32))
    draft, state = initial_draft(StudentConfig(init="model", path=str(tmp_path)), target), torch.get_rng_state()
    logits, shared = draft(input_ids=IDS).logits, min(rows, of_target)
    assert (draft.config.vocab_size, logits.shape[-1]) == (of_target, of_target)
    torch.testing.assert_close(logits[..., :shared], model(input_ids=IDS).logits[..., :shared])
    assert bool((logits.argmax(-1) < shared).all())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_fresh_draft_is_the_targets_config_with_some_values_replaced(target):
    overrides = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    draft = initial_draft(StudentConfig(init="fresh", overrides=overrides), target)
    assert {name: getattr(draft.config, name) for name in overrides} == overrides
    assert (draft.config.intermediate_size, draft.config.vocab_size) == (64, 64)
    assert all(parameter.requires_grad for parameter in draft.parameters())  # random embeddings must not stay random


@pytest.mark.parametrize(
    "overrides", [{"hiden_size": 16}, {"vocab_size": 32}, {"num_key_value_heads": 3}, {"hidden_size": "wide"}]
)
def test_overrides_that_make_no_draft_for_the_target_are_refused(target, overrides):
    with pytest.raises(ConfigError, match=rf"student\.overrides: .*{next(iter(overrides))}"):
        initial_draft(StudentConfig(init="fresh", overrides=overrides), target)


# --- adapters -----------------------------------------------------------------------------------------------------


@pytest.fixture
def draft(tiny_llama):
    return tiny_llama(seed=2)


def test_new_adapters_change_nothing_and_are_all_that_is_trained(draft):
    before = draft(input_ids=IDS).logits
    add_adapters(draft, LoraSettings(rank=4))
    torch.testing.assert_close(draft(input_ids=IDS).logits, before)
    trained = {name for name, parameter in draft.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * 7  # A and B of seven linear layers in each of two blocks
    assert all("lora_" in name for name in trained)


def test_merged_weights_compute_what_the_adapted_model_did_and_are_saved_as_a_plain_model(draft, tmp_path):
    names = list(draft.state_dict())
    before = draft(input_ids=IDS).logits
    add_adapters(draft, LoraSettings(rank=4, alpha=16, dropout=0.5))
    torch.manual_seed(0)
    for name, parameter in draft.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    adapted = draft.eval()(input_ids=IDS).logits
    merge_adapters(draft)
    torch.testing.assert_close(draft(input_ids=IDS).logits, adapted, rtol=0, atol=1e-9)
    assert (adapted - before).abs().max() > 0.1
    assert list(draft.state_dict()) == names
    assert all(type(module) is nn.Linear for name, module in draft.named_modules() if name.endswith("_proj"))
    draft.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}


def test_embeddings_are_trained_beside_adapters_only_where_asked(target):
    frozen = initial_draft(StudentConfig(layers=[0, 2], lora=LoraSettings()), target)
    trained = initial_draft(StudentConfig(layers=[0, 2], lora=LoraSettings(), train_embeddings=True), target)
    assert [draft.lm_head.weight.requires_grad for draft in (frozen, trained)] == [False, True]
    assert not trained.model.layers[0].mlp.up_proj.base_layer.weight.requires_grad


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


KEPT = [(name, [0, 2, 3]) for name in (*STATELESS, *HYBRIDS) if name not in BY_NUMBER | BY_PERIOD]


@pytest.mark.parametrize(("name", "layers"), [*KEPT, ("llama", [1, 3])], ids=str)
@torch.no_grad()
def test_kept_blocks_compute_what_they_did_in_the_target_also_once_saved_and_loaded(name, layers, tmp_path):
    model = tiny_model(name)
    before = [parameter.clone() for parameter in model.parameters()]
    draft = keep_layers(model, layers)
    expected_BTV, found_BTV = run_by_hand(model, layers), draft(input_ids=IDS_BT, use_cache=False).logits
    torch.testing.assert_close(found_BTV, expected_BTV)
    if name in HYBRIDS:  # blocks of several kinds
        draft.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
        torch.testing.assert_close(loaded(input_ids=IDS_BT, use_cache=False).logits, found_BTV)
    for parameter in draft.parameters():
        parameter.zero_()
    assert all(map(torch.equal, before, model.parameters()))  # nothing is shared with the target


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

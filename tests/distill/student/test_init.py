"""The draft before training: what cannot become one is refused; adapters change nothing until trained, and merge away."""

import pytest
import torch
from torch import nn

from configs.runtime.errors import ConfigError, InputError
from configs.schema.training import LoraSettings, StudentConfig
from distill.student.init import add_adapters, initial_draft, merge_adapters

IDS = torch.tensor([[7, 12, 3, 40]])


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1, layers=3, dtype=torch.float32))


def test_a_block_that_the_target_does_not_have_is_refused(target):
    with pytest.raises(InputError, match="3 was asked for, but LlamaForCausalLM has blocks 0 to 2"):
        initial_draft(StudentConfig(layers=[0, 3]), target)


def test_a_model_without_rows_for_every_token_is_refused(tmp_path, tiny_llama, tiny_tokenizer, target):
    tiny_llama(vocab_size=60).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has a vocabulary of 60, the target's tokenizer 64"):
        initial_draft(StudentConfig(init="model", path=str(tmp_path)), target)


def test_a_smaller_model_with_another_tokenizer_is_refused(target, tmp_path, tiny_llama, tiny_tokenizer):
    tiny_llama(seed=3, dtype=torch.float32).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert initial_draft(StudentConfig(init="model", path=str(tmp_path)), target).config.num_hidden_layers == 2
    other = tiny_tokenizer.__class__.from_pretrained(tmp_path)
    other.add_tokens(["another_word"])
    other.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="another tokenizer"):
        initial_draft(StudentConfig(init="model", path=str(tmp_path)), target)


def test_a_fresh_draft_is_the_targets_config_with_some_values_replaced(target):
    overrides = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    draft = initial_draft(StudentConfig(init="fresh", overrides=overrides), target)
    assert {name: getattr(draft.config, name) for name in overrides} == overrides
    assert (draft.config.intermediate_size, draft.config.vocab_size) == (64, 64)
    assert all(parameter.requires_grad for parameter in draft.parameters())  # random embeddings must not stay random


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hiden_size": 16}, "has no 'hiden_size'; the nearest it has is 'hidden_size'"),
        ({"vocab_size": 32}, "vocab_size is the target's"),
        ({"num_key_value_heads": 3}, "make no model"),
        ({"hidden_size": "wide"}, "make no model"),
    ],
)
def test_overrides_that_make_no_draft_for_the_target_are_refused(target, overrides, words):
    with pytest.raises(ConfigError, match=rf"student\.overrides: .*{words}"):
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

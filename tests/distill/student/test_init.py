"""The draft before training: what cannot become a draft is refused with the reason."""

import pytest
import torch

from configs.runtime.errors import ConfigError, InputError
from configs.schema.training import StudentConfig
from distill.student.init import initial_draft


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

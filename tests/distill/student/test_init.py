"""The draft before training: kept blocks compute what they did, and what cannot become a draft is refused with the reason."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from configs.runtime.errors import InputError
from configs.schema.learning import StudentConfig
from distill.student.init import initial_draft, keep_layers


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1, layers=3, dtype=torch.float32))


def test_a_draft_of_all_blocks_is_the_target(target):
    ids = torch.arange(5, 15).unsqueeze(0)
    torch.testing.assert_close(keep_layers(target.model, [0, 1, 2])(ids).logits, target.model(ids).logits)


def test_the_kept_blocks_are_the_ones_asked_for_in_order(target):
    kept = keep_layers(target.model, [0, 2]).model.layers
    for new, old in ((0, 0), (1, 2)):
        assert torch.equal(kept[new].mlp.up_proj.weight, target.model.model.layers[old].mlp.up_proj.weight)


def test_a_block_that_the_target_does_not_have_is_refused(target):
    with pytest.raises(InputError, match="3 was asked for, but LlamaForCausalLM has blocks 0 to 2"):
        initial_draft(StudentConfig(layers=[0, 3]), target)


def test_blocks_of_an_architecture_with_other_names_are_refused(as_target):
    target = as_target(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=3, n_head=2)))
    with pytest.raises(InputError, match="blocks of GPT2LMHeadModel cannot be kept"):
        initial_draft(StudentConfig(layers=[0, 2]), target)


@pytest.mark.parametrize("init", ["model", "config"])
def test_a_model_without_rows_for_every_token_is_refused(tmp_path, tiny_llama, tiny_tokenizer, target, init):
    tiny_llama(vocab_size=60).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has a vocabulary of 60, the target's tokenizer 64"):
        initial_draft(StudentConfig(init=init, path=str(tmp_path)), target)


@pytest.mark.parametrize("init", ["model", "config"])
def test_a_folder_that_holds_no_model_is_refused(tmp_path, target, init):
    with pytest.raises(InputError, match=r"student\.path: .* hold"):
        initial_draft(StudentConfig(init=init, path=str(tmp_path)), target)


def test_a_draft_with_dropout_is_checked_without_it(target):
    draft = initial_draft(StudentConfig(init="fresh", overrides={"attention_dropout": 0.5}), target)
    assert draft.training
    assert draft.config.attention_dropout == 0.5

"""The distillation loss sits on the label tokens and the draft starts as what it was cut from."""

import pytest
import torch
from torch.nn import functional as F

from configs.errors import InputError
from configs.schema import LossConfig, StudentConfig
from distill.batches import Example, collate
from distill.draft_init import initial_draft, keep_layers
from distill.objective import DraftObjective, target_hidden


@pytest.fixture
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1, dtype=torch.float32, layers=3))


@pytest.fixture
def batch():
    return collate([Example((7, 8, 9, 10, 11), 3), Example((12, 13, 14, 15, 16, 17, 18), 5)])


def loss_of(objective, target, batch, num_labels=1.0):
    hidden = target_hidden(target, batch)
    return objective(batch.input_ids_BT, batch.loss_mask_BT, hidden, torch.tensor(num_labels), 1)


def test_it_is_the_forward_kl_at_the_positions_before_each_label(target, tiny_llama, batch):
    draft = tiny_llama(seed=2, dtype=torch.float32)
    result = loss_of(DraftObjective(draft, target, LossConfig(chunk_size=2)), target, batch)
    expected = 0.0
    for ids, answer_start in (([7, 8, 9, 10, 11], 3), ([12, 13, 14, 15, 16, 17, 18], 5)):
        p = F.log_softmax(target.model(torch.tensor([ids])).logits[0].detach().double(), -1)
        q = F.log_softmax(draft(torch.tensor([ids])).logits[0].detach().double(), -1)
        for label in range(answer_start, len(ids)):
            expected += float((p[label - 1].exp() * (p[label - 1] - q[label - 1])).sum())
    assert float(result.loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert len(result.values_N) == 4


def test_a_draft_equal_to_the_target_has_loss_zero_and_full_acceptance(target, batch):
    result = loss_of(DraftObjective(keep_layers(target.model, [0, 1, 2]), target, LossConfig()), target, batch)
    assert float(result.loss.detach()) == pytest.approx(0.0, abs=1e-5)
    assert result.acceptance_N.tolist() == pytest.approx([1.0] * 4, abs=1e-5)


def test_neither_target_nor_frozen_embeddings_get_a_gradient(target, batch):
    draft = initial_draft(StudentConfig(layers=[0, 2]), target)
    loss_of(DraftObjective(draft, target, LossConfig()), target, batch).loss.backward()
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert draft.get_input_embeddings().weight.grad is None
    assert draft.get_output_embeddings().weight.grad is None
    assert draft.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_kept_layers_are_the_targets_own_in_order(target):
    draft = keep_layers(target.model, [0, 2])
    assert draft.config.num_hidden_layers == 2
    for new, old in enumerate([0, 2]):
        for one, other in zip(draft.model.layers[new].parameters(), target.model.model.layers[old].parameters(), strict=True):
            assert torch.equal(one, other)
    assert torch.equal(draft.lm_head.weight, target.model.lm_head.weight)


def test_a_layer_the_target_does_not_have_is_refused(target):
    with pytest.raises(InputError, match="blocks 0 to 2"):
        initial_draft(StudentConfig(layers=[0, 3]), target)


def test_a_smaller_model_with_another_tokenizer_is_refused(target, tmp_path, tiny_llama, tiny_tokenizer):
    tiny_llama(seed=3, dtype=torch.float32).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert initial_draft(StudentConfig(init="model", path=str(tmp_path)), target).config.num_hidden_layers == 2
    other = tiny_tokenizer.__class__.from_pretrained(tmp_path)
    other.add_tokens(["another_word"])
    other.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="another tokenizer"):
        initial_draft(StudentConfig(init="model", path=str(tmp_path)), target)


def test_a_fresh_draft_comes_from_a_config_and_must_know_every_token(target, tmp_path, tiny_llama):
    tiny_llama(seed=3, layers=1).config.save_pretrained(tmp_path)
    draft = initial_draft(StudentConfig(init="config", path=str(tmp_path)), target)
    assert draft.config.num_hidden_layers == 1
    tiny_llama(seed=3, vocab_size=30).config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="vocabulary of 30"):
        initial_draft(StudentConfig(init="config", path=str(tmp_path)), target)


def test_padded_rows_of_a_larger_draft_vocabulary_are_left_out(target, tiny_llama, batch):
    padded = tiny_llama(seed=2, vocab_size=80, dtype=torch.float32)
    plain = loss_of(DraftObjective(padded, target, LossConfig()), target, batch)
    with torch.no_grad():
        padded.lm_head.weight[64:] = 100.0
    assert float(loss_of(DraftObjective(padded, target, LossConfig()), target, batch).loss.detach()) == float(
        plain.loss.detach()
    )

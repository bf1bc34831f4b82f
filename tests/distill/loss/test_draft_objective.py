"""The distillation loss sits on the label tokens and the draft starts as what it was cut from."""

import pytest
import torch
from torch.nn import functional as F

from configs.runtime.errors import InputError
from configs.schema.training import LossConfig, StudentConfig
from distill.dataset.batches import Example, collate
from distill.loss.objectives import DraftObjective
from distill.student.init import initial_draft, keep_layers
from heads.vocabulary import DraftVocabulary
from tests.support.losses import target_hidden


@pytest.fixture
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1, dtype=torch.float32, layers=3))


@pytest.fixture
def batch():
    return collate([Example((7, 8, 9, 10, 11), 3), Example((12, 13, 14, 15, 16, 17, 18), 5)])


def loss_of(objective, target, batch):
    return objective(batch, target_hidden(target, batch))


@pytest.mark.parametrize("mix", [{"forward_kl": 1.0}, {"cross_entropy": 1.0}, {"forward_kl": 0.5, "cross_entropy": 2.0}])
def test_it_is_the_divergence_at_the_positions_before_each_label(target, tiny_llama, batch, mix):
    draft = tiny_llama(seed=2, dtype=torch.float32)
    result = loss_of(DraftObjective(draft, target, LossConfig(divergence=mix, chunk_size=2)), target, batch)
    expected = 0.0
    for ids, answer_start in (([7, 8, 9, 10, 11], 3), ([12, 13, 14, 15, 16, 17, 18], 5)):
        p = F.log_softmax(target.model(torch.tensor([ids])).logits[0].detach().double(), -1)
        q = F.log_softmax(draft(torch.tensor([ids])).logits[0].detach().double(), -1)
        for label in range(answer_start, len(ids)):
            kl = float((p[label - 1].exp() * (p[label - 1] - q[label - 1])).sum())
            expected += mix.get("forward_kl", 0) * kl - mix.get("cross_entropy", 0) * float(q[label - 1, ids[label]])
    assert float(result.loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert len(result.values_N) == 4


def test_a_draft_equal_to_the_target_has_loss_zero_and_full_acceptance(target, batch):
    result = loss_of(DraftObjective(keep_layers(target.model, [0, 1, 2]), target, LossConfig()), target, batch)
    assert float(result.loss.detach()) == pytest.approx(0.0, abs=1e-5)
    assert result.acceptance_N.tolist() == pytest.approx([1.0] * 4, abs=1e-5)
    assert result.top1_agrees_N.all()


def test_neither_target_nor_frozen_embeddings_get_a_gradient(target, batch):
    draft = initial_draft(StudentConfig(layers=[0, 2]), target)
    loss_of(DraftObjective(draft, target, LossConfig()), target, batch).loss.backward()
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert draft.get_input_embeddings().weight.grad is None
    assert draft.get_output_embeddings().weight.grad is None
    assert draft.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_padded_rows_of_a_larger_draft_vocabulary_are_left_out(target, tiny_llama, batch):
    padded = tiny_llama(seed=2, vocab_size=80, dtype=torch.float32)
    plain = loss_of(DraftObjective(padded, target, LossConfig()), target, batch)
    with torch.no_grad():
        padded.lm_head.weight[64:] = 100.0
    assert float(loss_of(DraftObjective(padded, target, LossConfig()), target, batch).loss.detach()) == float(
        plain.loss.detach()
    )


# --- reduced draft vocabulary -------------------------------------------------------------------------------------

IDS = [1, 8, 9, 10, 17, 33, 50]


@pytest.fixture
def vocabulary():
    return DraftVocabulary(token_ids_W=torch.tensor(IDS), target_vocab_size=64)


def test_a_trained_head_gets_gradients_at_the_rows_of_the_vocabulary_only(target, vocabulary, batch):
    draft = initial_draft(StudentConfig(layers=[0, 2], train_embeddings=True), target)
    objective = DraftObjective(draft, target, LossConfig(chunk_size=1), vocabulary)
    loss_of(objective, target, batch).loss.backward()
    assert draft.lm_head.weight.grad.abs().sum(-1).nonzero().flatten().tolist() == IDS
    assert "token_ids_W" not in objective.state_dict()


def test_a_draft_without_rows_for_its_vocabulary_is_refused_before_any_step(target, tiny_llama, vocabulary):
    with pytest.raises(InputError, match="token 50; the draft's head has 40 rows"):
        DraftObjective(tiny_llama(vocab_size=40), target, LossConfig(), vocabulary)

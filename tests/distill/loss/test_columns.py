"""A loss over sampled columns: over all of them the whole loss, and its sums on average those of the whole vocabulary."""

from itertools import permutations
from types import SimpleNamespace

import pytest
import torch

from configs.runtime.errors import ConfigError
from configs.schema.learning import LossConfig
from distill.loss.columns import ColumnSampler
from distill.loss.head_objective import HeadObjective
from heads.vocabulary import DraftVocabulary
from tests.support import family_checks as checks

IDS = torch.tensor([2, 3, 5, 7, 11, 13, 17, 19, 44])


def small_batch(model, taps):
    return checks.inputs_of(model, [[1, 5, 9, 44, 7], [3, 2, 9]], taps)


@pytest.mark.parametrize(("num_columns", "num_read"), [(1, 6), (5, 6), (6, 6), (7, 7)])  # five of them are always there
def test_sums_over_columns_are_on_average_those_over_all(num_columns, num_read, monkeypatch):
    model = checks.tiny_target("llama")
    batch, _ = small_batch(model, (1,))
    sampler, values_W = ColumnSampler(IDS, torch.tensor([13, 40]), num_columns), torch.randn(len(IDS)).exp()
    orders = list(permutations(range(4)))  # of the labels 2, 5, 7, 9, 44 the draft proposes four, and 13 is kept: four are left
    sums = []
    for order in orders:
        monkeypatch.setattr(torch, "randperm", lambda size, order=order: torch.tensor(order))
        columns = sampler.draw(batch)
        assert len(columns.places_S) == num_read
        assert torch.equal(columns.token_ids_S, IDS[columns.places_S])
        assert set(columns.token_ids_S.tolist()) >= {2, 5, 7, 13, 44}
        sums.append((values_W[columns.places_S].log() + columns.log_weights_S).exp().sum())
    assert sum(sums) / len(sums) == pytest.approx(float(values_W.sum()), rel=1e-5)


@pytest.mark.parametrize("vocabulary", [None, IDS], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "hydra"])
def test_over_all_columns_the_loss_and_gradient_are_the_whole_ones(kind, vocabulary):
    model = checks.tiny_target("llama")
    vocab_size = model.config.vocab_size
    reduced = None if vocabulary is None else DraftVocabulary(token_ids_W=vocabulary, target_vocab_size=vocab_size)
    head = checks.build(checks.SETTINGS[kind], model, reduced).double()
    batch, states = small_batch(model, head.taps)
    ids_W = torch.arange(vocab_size) if vocabulary is None else vocabulary
    sampler = ColumnSampler(ids_W, ids_W[:2], len(ids_W))
    results = []
    for each in (None, sampler):
        objective = HeadObjective(head, SimpleNamespace(model=model), LossConfig(), sampler=each)
        result = objective(batch, states, torch.tensor(6.0), 1)
        gradients = torch.autograd.grad(result.loss, list(head.parameters()), allow_unused=True)
        results.append((result.loss.detach(), result.acceptance_K, [each for each in gradients if each is not None]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_evaluation_reads_every_column_and_draws_none():
    model = checks.tiny_target("llama")
    head = checks.build(checks.SETTINGS["eagle3"], model)
    batch, states = small_batch(model, head.taps)
    ids_W = torch.arange(model.config.vocab_size)
    results = []
    before = torch.get_rng_state()
    for sampler in (None, ColumnSampler(ids_W, ids_W[:2], 8)):
        objective = HeadObjective(head, SimpleNamespace(model=model), LossConfig(), sampler=sampler).eval()
        results.append(vars(objective(batch, states, torch.tensor(6.0), 1)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(*results)


def test_what_cannot_be_sampled_is_refused():
    with pytest.raises(ValueError, match="sampled_tokens is for temperature 1"):
        LossConfig(sampled_tokens=8, temperature=2.0)


@pytest.mark.parametrize("kind", ["dspark", "dflash2", "xpress", "domino"])
def test_heads_whose_logits_are_more_than_a_matrix_are_refused(kind):
    model = checks.tiny_target("llama")
    head = checks.build(checks.SETTINGS[kind], model)
    sampler = ColumnSampler(torch.arange(model.config.vocab_size), torch.tensor([1]), 8)
    with pytest.raises(ConfigError, match=rf"loss.sampled_tokens: the output head of {type(head).__name__} is more"):
        HeadObjective(head, SimpleNamespace(model=model), LossConfig(), sampler=sampler)(
            *small_batch(model, head.taps), torch.tensor(6.0), 1
        )

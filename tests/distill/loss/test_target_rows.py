"""The target's side of the chunked loss: a sparse target gives the loss of its pairs, and the dense one where all is kept."""

import pytest
import torch
from torch.nn import functional as F

from distill.loss.chunked import chunked_loss, chunked_loss_against, linear_head
from distill.loss.divergences import DIVERGENCES, SparseTarget, acceptance, forward_kl, sparse_pair
from distill.loss.target_logits import SparseRows

ROWS, WIDTH, VOCABULARY = 6, 5, 19


@pytest.fixture
def inputs():
    """Draft hidden states and head, target hidden states and head, weights (one of them 0), labels; in float64."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = drawn(ROWS).abs()
    weights[2] = 0
    return {
        "hidden": drawn(ROWS, WIDTH).requires_grad_(),
        "head": drawn(VOCABULARY, WIDTH).requires_grad_(),
        "target_hidden": drawn(ROWS, 4),
        "target_head": drawn(VOCABULARY, 4),
        "weights": weights,
        "labels": torch.tensor([0, 3, 18, -1, 7, 7]),
    }


def kept(inputs, k):
    log_p = F.linear(inputs["target_hidden"], inputs["target_head"]).log_softmax(-1)
    log_probs, ids = log_p.topk(k)
    return SparseTarget(log_probs=log_probs, token_ids=ids, log_tail=log_p.scatter(-1, ids, -torch.inf).logsumexp(-1))


def sparse_loss(inputs, target, divergence, chunk_size=2, **options):
    head = linear_head(inputs["head"])
    options = {"labels_N": inputs["labels"], **options}
    return chunked_loss_against(
        SparseRows(target=target), inputs["hidden"], head, divergence, inputs["weights"], chunk_size=chunk_size, **options
    )


def gradients(loss, inputs):
    return torch.autograd.grad(loss, (inputs["hidden"], inputs["head"]))


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_value_and_gradients_are_those_of_the_sparse_pairs(inputs, name, chunk_size):
    target = kept(inputs, 4)
    pair = sparse_pair(target, F.linear(inputs["hidden"], inputs["head"]), labels=inputs["labels"])
    values = DIVERGENCES[name](pair)
    expected = (values * inputs["weights"]).sum()
    found = sparse_loss(inputs, target, DIVERGENCES[name], chunk_size)
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(found.loss, inputs), gradients(expected, inputs), rtol=1e-12, atol=1e-13)
    weighed = inputs["weights"] != 0
    torch.testing.assert_close(found.acceptance_N[weighed], acceptance(pair)[weighed].detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_target_of_the_whole_vocabulary_is_the_dense_one(inputs, name):
    heads = linear_head(inputs["head"]), linear_head(inputs["target_head"])
    dense = chunked_loss(
        inputs["hidden"],
        heads[0],
        inputs["target_hidden"],
        heads[1],
        DIVERGENCES[name],
        inputs["weights"],
        chunk_size=2,
        labels_N=inputs["labels"],
    )
    found = sparse_loss(inputs, kept(inputs, VOCABULARY), DIVERGENCES[name])
    torch.testing.assert_close(found.loss, dense.loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(gradients(found.loss, inputs), gradients(dense.loss, inputs), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.acceptance_N, dense.acceptance_N, rtol=1e-10, atol=0)
    assert torch.equal(found.top1_agrees_N, dense.top1_agrees_N)


def test_fewer_kept_tokens_never_raise_the_divergence(inputs):
    losses = [float(sparse_loss(inputs, kept(inputs, k), forward_kl).loss.detach()) for k in (1, 3, 8, VOCABULARY)]
    assert losses == sorted(losses)
    assert losses[0] > 0


def test_another_temperature_than_the_recorded_one_is_refused(inputs):
    with pytest.raises(ValueError, match=r"recorded at temperature 1\.0, asked for 2\.0"):
        sparse_loss(inputs, kept(inputs, 3), forward_kl, temperature=2.0)


def test_a_reduced_draft_vocabulary_is_refused(inputs):
    with pytest.raises(ValueError, match="reduced draft vocabulary"):
        sparse_loss(inputs, kept(inputs, 3), forward_kl, draft_token_ids_W=torch.arange(VOCABULARY), labels_N=None)

"""The target's side of the loss: normalised rows pair as whole rows do, and sparse ones give the loss of their pairs."""

import pytest
import torch
from torch.nn import functional as F

from distill.loss.chunked import chunked_loss, model_head
from distill.loss.divergences import DIVERGENCES, acceptance, forward_kl
from distill.loss.pairs import HiddenRows, NormalisedRows, SparseRows, dense_pair, normalise, sparse_pair
from heads.inference.causal_lm import HeadRows, head_logits
from tests.support import family_checks as checks
from tests.support.losses import dense_loss, keep_top, linear_head

IDS_W = torch.tensor([0, 3, 17, 40, 63])
HIDDEN_BTE = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
WANTED_P = torch.tensor([True, False, True, True, False, True] * 2)
ROWS, WIDTH, VOCABULARY = 6, 5, 19


def rows_of(model, dtype=torch.float64):
    hidden_BTE = HIDDEN_BTE.to(dtype)
    known = normalise(model, hidden_BTE, WANTED_P, chunk_size=3)
    return NormalisedRows(
        hidden_NE=hidden_BTE.flatten(0, 1)[WANTED_P],
        head=HeadRows(model, IDS_W),
        log_sum_N=known.log_sum_P[WANTED_P],
        top1_N=known.top1_P[WANTED_P],
    )


@pytest.mark.parametrize("name", sorted(checks.CONFIGS))
def test_normalisers_are_those_of_whole_rows_where_they_are_wanted(name):
    model = checks.tiny_target(name)
    logits_PV = head_logits(model, HIDDEN_BTE.flatten(0, 1))
    for chunk_size in (1, 5, 100):
        known = normalise(model, HIDDEN_BTE, WANTED_P, chunk_size=chunk_size)
        torch.testing.assert_close(known.log_sum_P[WANTED_P], logits_PV.logsumexp(-1)[WANTED_P])
        assert torch.equal(known.top1_P[WANTED_P], logits_PV.argmax(-1)[WANTED_P])
        assert not known.log_sum_P[~WANTED_P].any()
        assert not known.top1_P[~WANTED_P].any()


@pytest.mark.parametrize("name", sorted(checks.CONFIGS))
def test_a_pair_is_the_one_of_whole_rows(name):
    model = checks.tiny_target(name)
    draft_NW = torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = HiddenRows(hidden_NE=HIDDEN_BTE.flatten(0, 1)[WANTED_P], logits_of=model_head(model).logits_of)
    rows = torch.tensor([6, 0, 3])
    ours = rows_of(model).at(rows)
    expected = dense_pair(whole.at(rows).logits_CV, draft_NW[rows], draft_token_ids_W=IDS_W)
    found = ours.pair(draft_NW[rows], temperature=1.0, draft_token_ids_W=IDS_W)
    for divergence in (acceptance, *(each for key, each in DIVERGENCES.items() if key != "cross_entropy")):
        torch.testing.assert_close(divergence(found), divergence(expected))
    assert torch.equal(ours.top1_C, whole.at(rows).top1_C)
    assert (ours.num_columns, len(rows_of(model))) == (5, 8)
    part = ours.part(slice(1, 3)).pair(draft_NW[rows][1:], temperature=1.0)
    torch.testing.assert_close(acceptance(part), acceptance(expected)[1:])


def test_what_the_draft_cannot_say_keeps_its_mass():
    model = checks.tiny_target("llama")
    chunk = rows_of(model).at(torch.arange(8))
    pair = chunk.pair(torch.zeros(8, 5), temperature=1.0)
    p_NV = head_logits(model, HIDDEN_BTE.flatten(0, 1)[WANTED_P]).softmax(-1)
    torch.testing.assert_close(pair.p.sum(-1), p_NV[:, IDS_W].sum(-1))
    torch.testing.assert_close(pair.log_reach.exp(), p_NV[:, IDS_W].sum(-1))
    assert bool((pair.p.sum(-1) < 1).all())


def test_a_reach_of_nearly_nothing_stays_a_number():
    chunk = rows_of(checks.tiny_target("llama")).at(torch.arange(8))
    far = type(chunk)(logits_CW=chunk.logits_CW - 1e9, log_sum_C=chunk.log_sum_C, top1_C=chunk.top1_C)
    pair = far.pair(torch.zeros(8, 5), temperature=1.0)
    for name in ("forward_kl", "total_variation", "negative_log_acceptance"):
        assert torch.isfinite(DIVERGENCES[name](pair)).all()


def test_sums_of_16_bit_logits_are_taken_in_float32(tiny_llama):
    model = tiny_llama(dtype=torch.bfloat16)
    known = normalise(model, HIDDEN_BTE.bfloat16(), WANTED_P, chunk_size=4)
    logits_PV = head_logits(model, HIDDEN_BTE.bfloat16().flatten(0, 1))
    assert known.log_sum_P.dtype == torch.float32
    torch.testing.assert_close(known.log_sum_P[WANTED_P], logits_PV.float().logsumexp(-1)[WANTED_P], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("wrong", [{"temperature": 2.0}, {"temperature": 1.0, "labels": torch.zeros(8, dtype=torch.long)}])
def test_another_temperature_and_labels_are_not_for_them(wrong):
    chunk = rows_of(checks.tiny_target("llama")).at(torch.arange(8))
    with pytest.raises(ValueError, match="normalised rows are for temperature 1 and without labels"):
        chunk.pair(linear_head(torch.zeros(5, 32)).logits_of(torch.zeros(8, 32)), **wrong)


# --- sparse rows --------------------------------------------------------------------------------------------------


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
    return keep_top(F.linear(inputs["target_hidden"], inputs["target_head"]), k)


def sparse_loss(inputs, target, divergence, chunk_size=2, **options):
    head = linear_head(inputs["head"])
    options = {"labels_N": inputs["labels"], **options}
    return chunked_loss(
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
    dense = dense_loss(
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

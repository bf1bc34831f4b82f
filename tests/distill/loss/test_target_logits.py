"""Rows whose sum over all tokens is known say of W tokens exactly what rows of all logits say."""

import pytest
import torch

from distill.loss.chunked import linear_head, model_head
from distill.loss.divergences import DIVERGENCES, acceptance, dense_pair
from distill.loss.target_logits import HiddenRows, NormalisedRows, normalise
from heads.inference.causal_lm import head_logits
from heads.proposers.vocabulary import HeadRows
from tests.support import family_checks as checks

IDS_W = torch.tensor([0, 3, 17, 40, 63])
HIDDEN_BTE = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
WANTED_P = torch.tensor([True, False, True, True, False, True] * 2)


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
    far = type(chunk)(logits_CW=chunk.logits_CW - 1e9, log_sum_C=chunk.log_sum_C, likeliest_C=chunk.likeliest_C)
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

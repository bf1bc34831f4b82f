"""The target's side of the loss: normalised rows pair as whole rows do, and sparse ones give the loss of their pairs."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from distill.loss.divergences import DIVERGENCES, acceptance, forward_kl
from distill.loss.logit_head import model_head
from distill.loss.pairs import HiddenRows, normalise
from heads.inference.causal_lm import HeadRows, head_logits
from heads.modules.interface import Normalisers
from tests.support import family_checks as checks
from tests.support.losses import chunked_loss, dense_pair, keep_top, linear_head

IDS_W = torch.tensor([0, 3, 17, 40, 63])
HIDDEN_BTE = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
WANTED_N = torch.tensor([0, 2, 3, 5, 6, 8, 9, 11])  # of twelve places
ROWS, WIDTH, VOCABULARY = 6, 5, 19


def rows_of(model):
    known = normalise(model, HIDDEN_BTE, WANTED_N, chunk_size=3)
    return HiddenRows(
        hidden_NE=HIDDEN_BTE.flatten(0, 1)[WANTED_N],
        logits_of=HeadRows.of(model, IDS_W).logits,
        known=Normalisers(log_sum_P=known.log_sum_P[WANTED_N], top1_P=known.top1_P[WANTED_N]),
    )


@pytest.mark.parametrize("name", sorted(checks.CONFIGS))
def test_normalisers_are_those_of_whole_rows_where_they_are_wanted(name):
    model = checks.tiny_target(name)
    logits_PV = head_logits(model, HIDDEN_BTE.flatten(0, 1))
    wanted_P = torch.zeros(12, dtype=torch.bool).index_fill(0, WANTED_N, True)
    for chunk_size in (1, 5, 100):
        known = normalise(model, HIDDEN_BTE, WANTED_N, chunk_size=chunk_size)
        torch.testing.assert_close(known.log_sum_P, torch.where(wanted_P, logits_PV.logsumexp(-1), 0))
        assert torch.equal(known.top1_P, torch.where(wanted_P, logits_PV.argmax(-1), 0))


@pytest.mark.parametrize("name", sorted(checks.CONFIGS))
def test_a_pair_is_the_one_of_whole_rows(name):
    model = checks.tiny_target(name)
    draft_NW = torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = HiddenRows(hidden_NE=HIDDEN_BTE.flatten(0, 1)[WANTED_N], logits_of=model_head(model).logits_of)
    rows = slice(3, 6)
    ours = rows_of(model).at(rows)
    expected = dense_pair(whole.at(rows).logits_CX, draft_NW[rows], draft_token_ids_W=IDS_W)
    found = ours.pair(draft_NW[rows], temperature=1.0, draft_token_ids_W=IDS_W)
    for side in ("log_p", "log_q", "log_reach"):
        torch.testing.assert_close(getattr(found, side), getattr(expected, side))
    assert torch.equal(ours.top1_C, whole.at(rows).top1_C)
    assert ours.num_columns == 5
    part = ours.at(slice(1, 3)).pair(draft_NW[rows][1:], temperature=1.0)
    torch.testing.assert_close(part.log_p, expected.log_p[1:])


def test_a_reach_of_nearly_nothing_stays_a_number():
    chunk = rows_of(checks.tiny_target("llama")).at(slice(8))
    far = replace(chunk, logits_CX=chunk.logits_CX - 1e9)
    pair = far.pair(torch.zeros(8, 5), temperature=1.0)
    for name in ("forward_kl", "total_variation", "negative_log_acceptance"):
        assert torch.isfinite(DIVERGENCES[name](pair)).all()


def test_sums_of_16_bit_logits_are_taken_in_float32(tiny_llama):
    model = tiny_llama(dtype=torch.bfloat16)
    known = normalise(model, HIDDEN_BTE.bfloat16(), WANTED_N, chunk_size=4)
    logits_PV = head_logits(model, HIDDEN_BTE.bfloat16().flatten(0, 1))
    assert known.log_sum_P.dtype == torch.float32
    torch.testing.assert_close(known.log_sum_P[WANTED_N], logits_PV.float().logsumexp(-1)[WANTED_N], atol=1e-2, rtol=1e-2)


# --- sparse rows --------------------------------------------------------------------------------------------------


class SparseInputs:
    """Draft hidden states and head, target hidden states and head, weights (one of them 0), labels; in float64."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        sizes = (ROWS, WIDTH), (VOCABULARY, WIDTH), (ROWS, 4), (VOCABULARY, 4), (ROWS,)
        drawn = [torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes]
        self.trained, (self.target_hidden, self.target_head) = [each.requires_grad_() for each in drawn[:2]], drawn[2:4]
        self.weights = drawn[4].abs()
        self.weights[2] = 0
        self.labels = torch.tensor([0, 3, 18, -1, 7, 7])

    def kept(self, k):
        return keep_top(F.linear(self.target_hidden, self.target_head), k)

    def loss(self, target, divergence, **options):
        hidden, head = self.trained
        options = {"labels_N": self.labels, "chunk_size": 4} | options
        return chunked_loss(target, hidden, linear_head(head), divergence, self.weights, **options)


@pytest.mark.parametrize("num_kept", [4, VOCABULARY - 1])  # the latter with as many buckets as there are draft logits
@pytest.mark.parametrize("name", DIVERGENCES)
def test_value_and_gradients_are_those_of_the_sparse_pairs(name, num_kept):
    inputs = SparseInputs()
    target = inputs.kept(num_kept)
    pair = target.pair(F.linear(*inputs.trained), temperature=1.0, labels=inputs.labels)
    expected = (DIVERGENCES[name](pair) * inputs.weights).sum()
    found = inputs.loss(target, DIVERGENCES[name])
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=0)
    ours, theirs = (torch.autograd.grad(loss, inputs.trained, retain_graph=True) for loss in (found.loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    weighed = inputs.weights != 0
    torch.testing.assert_close(found.acceptance_N[weighed], acceptance(pair)[weighed].detach(), rtol=1e-12, atol=0)


def test_fewer_kept_tokens_never_raise_the_divergence():
    inputs = SparseInputs()
    losses = [float(inputs.loss(inputs.kept(k), forward_kl).loss.detach()) for k in (1, 3, 8, VOCABULARY)]
    assert losses == sorted(losses)
    assert losses[0] > 0


@pytest.mark.parametrize("options", [{"temperature": 2.0}, {"draft_token_ids_W": torch.arange(VOCABULARY), "labels_N": None}])
def test_what_a_sparse_target_cannot_give_is_refused(options):
    inputs = SparseInputs()
    with pytest.raises(ValueError, match="for temperature 1, at which it was recorded, and the whole vocabulary"):
        inputs.loss(inputs.kept(3), forward_kl, **options)

"""Losses and targets for tests of the loss: dense targets from hidden states, sparse ones cut out of logits."""

import torch
from torch.nn import functional

from distill.loss.chunked import LossPart, chunked_losses
from distill.loss.logit_head import LogitHead
from distill.loss.pairs import DenseChunk, HiddenRows, SparseTarget
from distill.signals import SignalSource


def linear_head(weight_VD, bias_V=None):
    """Return the head `hidden @ weight.T + bias`."""
    parameters = (weight_VD,) if bias_V is None else (weight_VD, bias_V)
    return LogitHead(logits_of=lambda hidden_CD: functional.linear(hidden_CD, weight_VD, bias_V), parameters=parameters)


def random_logits(seed, columns=11):
    """Return seven rows of random logits in float64, always the same."""
    return 2 * torch.randn(7, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense_pair(target_logits, draft_logits, **options):
    """Pair whole rows of logits."""
    return DenseChunk(logits_CX=target_logits).pair(draft_logits, **options)


def chunked_loss(target, draft_hidden_ND, draft_head, divergence, weights_N, *, chunk_size, temperature=1.0, **more):
    """Return the loss of one part."""
    part = LossPart(target=target, draft_hidden_ND=draft_hidden_ND, draft_head=draft_head, weights_N=weights_N, **more)
    return chunked_losses([part], divergence, chunk_size=chunk_size, temperature=temperature)[0]


def dense_loss(draft_hidden_ND, draft_head, target_hidden_NE, target_head, divergence, weights_N, **options):
    """Return the chunked loss against a target whose hidden states and head are given."""
    target = HiddenRows(hidden_NE=target_hidden_NE, logits_of=target_head.logits_of)
    return chunked_loss(target, draft_hidden_ND, draft_head, divergence, weights_N, **options)


def keep_top(logits, num_kept):
    """Return the sparse target that keeps the most likely tokens of rows of logits."""
    log_p = logits.log_softmax(-1)
    kept = log_p.topk(num_kept)
    log_tail = log_p.scatter(-1, kept.indices, -torch.inf).logsumexp(-1)
    return SparseTarget(log_probs=kept.values, token_ids=kept.indices, log_tail=log_tail)


def target_hidden(target, batch):
    """Return the target's final hidden states `[B, T, E]` over a batch, computed here."""
    return SignalSource(target).read(batch).dense.final_BTE
